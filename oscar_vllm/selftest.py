"""A self-test of the kernels on this machine's device: write a few requests, attend to them, compare with float64."""

from dataclasses import dataclass
from typing import Any

import torch

from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS, PageLayout
from oscar_vllm.calibration.transforms import hadamard
from oscar_vllm.kernels.context.reference import gather_reference
from oscar_vllm.kernels.decode import attend
from oscar_vllm.kernels.views import CacheView, LayerRecipe
from oscar_vllm.kernels.write import write
from oscar_vllm.kernels.write.reference import write_reference

LENGTHS = (700, 130, 33, 1)
"""Tokens of the requests: several pages, one past a page, within a page, one."""
CODE_LIMIT, ATTENTION_LIMIT = 1e-3, 4e-3
"""What a healthy device stays below: differing bytes of the pages; relative error with a 16-bit output."""


@dataclass
class SelfTest:
    """What a device's kernels got wrong."""

    device: str
    differing_bytes: float
    """Share of the bytes written to the pages that differ from the PyTorch twin's."""
    attention_error: float
    """Relative error of decode attention against float64 on the same caches."""

    @property
    def passed(self) -> bool:
        return self.differing_bytes <= CODE_LIMIT and self.attention_error <= ATTENTION_LIMIT


def _moved(parts: Any, device: torch.device) -> Any:
    """A named tuple with its tensors on ``device``."""
    return type(parts)(*(x.to(device) if isinstance(x, torch.Tensor) else x for x in parts))


def _recipe(heads: int, dim: int, generator: torch.Generator) -> LayerRecipe:
    rotation = hadamard(dim).float().expand(heads, dim, dim).contiguous()
    ones = torch.ones(heads)
    mean = torch.randn(2, heads, dim, generator=generator)
    return LayerRecipe(rotation, rotation, rotation, rotation, mean[0], mean[1], ones, ones, ones, ones, 2)


def _attend_float64(query: torch.Tensor, view: CacheView, recipe: LayerRecipe, scale: float) -> torch.Tensor:
    """[R, Hq, D] attention of one query a request over what the caches hold."""
    heads, dim = recipe.key_mean.shape
    longest = int(view.seq_lens.max())
    keys, values = (x.double() for x in gather_reference(view, 0, longest))
    transformed = torch.einsum("rhgd,hde->rhge", query.double().unflatten(1, (heads, -1)), recipe.query.double())
    scores = scale * torch.einsum("rhgd,rhtd->rhgt", transformed, keys)
    scores = scores.masked_fill((torch.arange(longest) >= view.seq_lens[:, None])[:, None, None], -torch.inf)
    output = torch.einsum("rhgt,rhtd->rhgd", scores.softmax(-1), values)
    output = torch.einsum("rhgd,hde->rhge", output, recipe.output.double()) + recipe.value_mean[:, None]
    return output.reshape(len(query), -1, dim)


def run_selftest(device: torch.device, heads: int = 2, group: int = 4, dim: int = 128) -> SelfTest:
    """Write and read four requests with the kernels that serve on ``device``.

    Args:
        device: where to run; on the CPU the twins are compared with float64.
        heads: KV heads.
        group: query heads of a KV head.
        dim: head size.
    """
    generator = torch.Generator().manual_seed(0)
    recipe = _recipe(heads, dim, generator)
    pages = [-(-length // PAGE_TOKENS) for length in LENGTHS]
    slots = [-(-length // WINDOW_TOKENS) for length in LENGTHS]
    history = torch.zeros(1 + sum(pages), heads, PAGE_TOKENS, PageLayout(dim).token_bytes, dtype=torch.uint8)
    window = torch.zeros(1 + sum(slots), heads, WINDOW_TOKENS, 2 * dim, dtype=torch.bfloat16)
    block_table = torch.zeros(len(LENGTHS), max(pages), dtype=torch.int32)
    window_table = torch.zeros(len(LENGTHS), max(slots), dtype=torch.int32)
    history_slots: list[torch.Tensor] = []
    window_slots: list[torch.Tensor] = []
    for r, length in enumerate(LENGTHS):
        block_table[r, : pages[r]] = torch.arange(pages[r]) + 1 + sum(pages[:r])
        window_table[r, : slots[r]] = torch.arange(slots[r]) + 1 + sum(slots[:r])
        position = torch.arange(length)
        for table, size, found in (
            (block_table, PAGE_TOKENS, history_slots),
            (window_table, WINDOW_TOKENS, window_slots),
        ):
            found.append(table[r, position // size].long() * size + position % size)
    tokens = sum(LENGTHS)
    key, value = (torch.randn(tokens, heads, dim, generator=generator).bfloat16() for _ in range(2))
    query = torch.randn(len(LENGTHS), heads * group, dim, generator=generator).bfloat16()
    where, window_where = torch.cat(history_slots), torch.cat(window_slots)
    there = history.clone().to(device), window.clone().to(device)
    here = _moved(recipe, device)
    write(key.to(device), value.to(device), *there, where.to(device), window_where.to(device), here)
    write_reference(key, value, history, window, where, window_where, recipe)
    written = (history != 0).sum()
    differing = float((there[0].cpu() != history).sum() / written)
    view = CacheView(
        history=there[0],
        window=there[1],
        block_table=block_table.to(device),
        window_table=window_table.to(device),
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32, device=device),
        query_start=torch.arange(len(LENGTHS) + 1, dtype=torch.int32, device=device),
        sink=64,
        recent=256,
    )
    out = torch.empty_like(query, device=device)
    attend(query.to(device), view, here, dim**-0.5, max_query_len=1, out=out)
    want = _attend_float64(query, _moved(view, torch.device("cpu")), recipe, dim**-0.5)
    error = float((out.cpu().double() - want).norm() / want.norm())
    return SelfTest(str(device), differing, error)
