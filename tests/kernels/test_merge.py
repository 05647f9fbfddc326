"""The merge kernel on random partials, placed by an independent walk along the plan's line."""

import pytest
import torch
from caches import random_recipe

from oscar_vllm.kernels.decode.partials import Partials, SplitPlan
from oscar_vllm.kernels.merge.triton import merge_triton
from oscar_vllm.kernels.views import CacheView

SINK, RECENT = 32, 64


def item_costs(plan: SplitPlan, length: int, new: int) -> tuple[int, int]:
    """Costs of a request's history and window item, token by token."""
    if length == 0 or new == 0:
        return 0, 0
    old = range(max(length - new - RECENT, 0))
    tiles = max(len({p // plan.tile for p in old}), 1)
    blocks = len({p // 16 for p in range(length) if p < SINK or p >= length - new - RECENT})
    window = plan.item_cost + blocks * plan.block_cost if blocks else 0
    return plan.item_cost + tiles * plan.tile_cost, window


@pytest.mark.parametrize("programs", [1, 5, 33])
@pytest.mark.parametrize(("group", "bucket", "dim"), [(1, 1, 64), (4, 1, 128), (5, 4, 64), (16, 2, 128), (8, 1, 256)])
def test_merge(device: str, group: int, bucket: int, dim: int, programs: int) -> None:
    heads = 2
    lengths, new = [400, 0, 1, 130, 2000], [bucket, 0, 1, 1, bucket]
    blocks = -(-group * bucket // 16)
    columns = -(-group * bucket // blocks)
    plan = SplitPlan(
        programs=programs, tile=128, tile_cost=18, block_cost=16, item_cost=9, min_chunk=36,
        group=group, max_query_len=bucket, columns_pad=16, columns=columns, column_blocks=blocks,
    )  # fmt: skip
    lanes = heads * blocks
    costs = [item_costs(plan, *request) for request in zip(lengths, new, strict=True)]
    total = sum(sum(cost) * lanes for cost in costs)
    chunk = max(-(-total // programs), plan.min_chunk)
    slots = programs + 2 * lanes * len(lengths)
    output = torch.full((slots, columns, dim), float("nan"))
    lse = torch.full((slots, columns), float("nan"))
    owned: dict[tuple[int, int], list[int]] = {}
    position = 0
    for r, cost in enumerate(costs):
        for lane in range(lanes):
            for kind in range(2):
                stop = position + cost[kind]
                for program in range(position // chunk, -(-stop // chunk) if cost[kind] else 0):
                    slot = program + 2 * (r * lanes + lane) + kind
                    owned.setdefault((r, lane), []).append(slot)
                    lse[slot] = 20 * torch.randn(columns)
                    if torch.rand(()) < 0.2 and len(owned[r, lane]) > 1:
                        lse[slot] = -torch.inf  # an empty part: its output stays NaN
                    else:
                        output[slot] = torch.randn(columns, dim)
                position = stop
    start = torch.tensor([0, *new]).cumsum(0).int()
    empty = torch.empty(0)
    recipe = random_recipe(heads, dim, torch.Generator().manual_seed(0))
    view = CacheView(empty, empty, empty, empty, torch.tensor(lengths).int(), start, SINK, RECENT)

    want = torch.full((sum(new) + 1, heads * group, dim), float("nan"), dtype=torch.float64)
    want_lse = want[..., 0].clone()
    for (r, lane), used in owned.items():
        head, block = divmod(lane, blocks)
        for column in range(columns):
            token, g = divmod(block * columns + column, group)
            if token >= new[r]:
                continue
            e = lse[used, column].double() * torch.log(torch.tensor(2.0, dtype=torch.float64))
            parts = torch.where(e.isneginf()[:, None], 0.0, output[used, column].double())
            o = (e.softmax(0)[:, None] * parts).sum(0)
            o = o.view(8, dim // 8).T.flatten()  # field-major to channels
            place = int(start[r]) + token, head * group + g
            want[place] = o @ recipe.output[head].double() + recipe.value_mean[head].double()
            want_lse[place] = e.logsumexp(0)

    def on(x: torch.Tensor) -> torch.Tensor:
        return x.to(device)

    out = torch.full(want.shape, float("nan"), device=device)
    got_lse = torch.full(want_lse.shape, float("nan"), device=device)
    merge_triton(
        Partials(on(output), on(lse), plan),
        view._replace(seq_lens=on(view.seq_lens), query_start=on(view.query_start)),
        recipe._replace(output=on(recipe.output), value_mean=on(recipe.value_mean)),
        out,
        got_lse,
    )
    torch.testing.assert_close(out.double().cpu(), want, rtol=1e-4, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(got_lse.double().cpu(), want_lse, rtol=1e-5, atol=1e-4, equal_nan=True)
