"""Caches beyond 2^31 (and 2^32) bytes: the last blocks are addressed as well as the first."""

import pytest
import torch
from caches import random_case

from oscar_vllm.kernels.views import CacheView

HISTORY_BYTES, WINDOW_BYTES = 9 * 2**30, 5 * 2**30


def far(view: CacheView) -> CacheView:
    """The same tokens in the last blocks of large caches."""

    def move(cache: torch.Tensor, table: torch.Tensor, size: int) -> tuple[torch.Tensor, torch.Tensor]:
        blocks = size // (cache[0].numel() * cache.element_size())
        large = torch.empty(blocks, *cache.shape[1:], dtype=cache.dtype, device=cache.device)
        large[-len(cache) + 1 :] = cache[1:]  # block 0 stays the null block
        shift = blocks - len(cache)
        return large, torch.where(table > 0, table + shift, table).int()

    history, block_table = move(view.history, view.block_table, HISTORY_BYTES)
    window, window_table = move(view.window, view.window_table, WINDOW_BYTES)
    return view._replace(history=history, window=window, block_table=block_table, window_table=window_table)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
def test_attention_context_and_write_at_the_end_of_a_large_cache() -> None:
    from oscar_vllm.kernels.context.triton import gather_context_triton
    from oscar_vllm.kernels.decode.triton import attend_triton
    from oscar_vllm.kernels.write.triton import write_triton

    case = random_case([700, 130], heads=8, group=4, dim=128, missing=0.2).to("cuda")
    near, far_view = case.view, far(case.view)
    results = []
    for view in (near, far_view):
        out = torch.zeros_like(case.query)
        attend_triton(case.query, view, case.recipe, case.scale, max_query_len=1, out=out)
        keys, values = (torch.zeros(700, 8, 128, dtype=case.query.dtype, device="cuda") for _ in range(2))
        start, row = (torch.zeros(1, dtype=torch.int32, device="cuda") for _ in range(2))
        gather_context_triton(view, start, torch.tensor([0, 700]).int().cuda(), row, keys, values, 700)
        results.append((out[:2], keys, values))
    for mine, want in zip(results[1], results[0], strict=True):
        assert torch.equal(mine, want)

    tokens = torch.randn(2, 128, 8, 128, device="cuda", dtype=torch.bfloat16)
    written = []
    for view in (near, far_view):
        history, window = view.history.clone() if view is near else view.history, view.window
        slots = (len(history) - 1) * 128 + torch.arange(128, device="cuda")
        nowhere = torch.full_like(slots, -1)
        write_triton(tokens[0], tokens[1], history, window, slots, nowhere, case.recipe)
        written.append(history[-1])
    assert torch.equal(written[0], written[1])
