"""The merge kernel on random partials, placed by an independent walk along the plan's line."""

from typing import NamedTuple

import pytest
import torch
from caches import random_case, random_recipe

from oscar_vllm.kernels.decode.partials import Partials, SplitPlan
from oscar_vllm.kernels.decode.triton import decode_triton
from oscar_vllm.kernels.merge import triton as merge
from oscar_vllm.kernels.merge.triton import graph_batch, merge_triton
from oscar_vllm.kernels.views import CacheView, LayerRecipe

SINK, RECENT = 32, 64
HEADS = 2
SHAPES = [(1, 1, 64), (4, 1, 128), (5, 4, 64), (16, 2, 128), (8, 1, 256)]
NOTHING = -1e4
"""Log-sum-exp of a part that does not exist: no weight beside any other."""


def item_costs(plan: SplitPlan, length: int, new: int) -> tuple[int, int]:
    """Costs of a request's history and window item, token by token."""
    if length == 0 or new == 0:
        return 0, 0
    old = range(max(length - 1 - RECENT, 0))  # which the last token reads from the history
    tiles = max(len({p // plan.tile for p in old}), 1)
    blocks = len({p // 16 for p in range(length) if p < SINK or p >= length - new - RECENT})
    window = plan.item_cost + blocks * plan.block_cost if blocks else 0
    return plan.item_cost + tiles * plan.tile_cost, window


class Split(NamedTuple):
    """Partials of a batch, and the same parts lane by lane for an oracle."""

    partials: Partials
    view: CacheView
    recipe: LayerRecipe
    new: list[int]
    lanes: list[tuple[int, int]]
    """(request, lane) of each row of ``parts``."""
    parts: torch.Tensor
    """[P, rows, columns, D] float32 in channel order."""
    lse: torch.Tensor
    """[P, rows, columns] float32, natural."""


def random_split(group: int, bucket: int, dim: int, programs: int) -> Split:
    """Five requests, among them an empty one and parts without keys, shared by ``programs``."""
    lengths, new = [400, 0, 1, 130, 2000], [bucket, 0, 1, 1, bucket]
    blocks = -(-group * bucket // 16)
    columns = -(-group * bucket // blocks)
    plan = SplitPlan(
        programs=programs, tile=128, tile_cost=18, block_cost=16, item_cost=9, min_chunk=36,
        group=group, max_query_len=bucket, columns_pad=16, columns=columns, column_blocks=blocks,
    )  # fmt: skip
    lanes = HEADS * blocks
    costs = [item_costs(plan, *request) for request in zip(lengths, new, strict=True)]
    chunk = max(-(-sum(sum(cost) * lanes for cost in costs) // programs), plan.min_chunk)
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
    most = max(map(len, owned.values()))
    parts = torch.zeros(most, len(owned), columns, dim)
    natural = torch.full(parts.shape[:-1], NOTHING)
    for row, used in enumerate(owned.values()):
        for part, slot in enumerate(used):
            if lse[slot, 0] > -torch.inf:
                parts[part, row] = output[slot].unflatten(-1, (8, dim // 8)).mT.flatten(-2)  # from field-major
                natural[part, row] = lse[slot] * 0.6931471805599453
    empty = torch.empty(0)
    start = torch.tensor([0, *new]).cumsum(0).int()
    view = CacheView(empty, empty, empty, empty, torch.tensor(lengths).int(), start, SINK, RECENT)
    recipe = random_recipe(HEADS, dim, torch.Generator().manual_seed(0))
    return Split(Partials(output, lse, plan), view, recipe, new, list(owned), parts, natural)


def check(split: Split, device: str, merged: torch.Tensor, merged_lse: torch.Tensor) -> None:
    """The kernel's output against the oracle's merge [rows, columns, D] and log-sum-exp [rows, columns]."""
    plan, recipe = split.partials.plan, split.recipe
    dim = merged.shape[-1]
    want = torch.full((sum(split.new) + 1, HEADS * plan.group, dim), float("nan"), dtype=torch.float64)
    want_lse = want[..., 0].clone()
    for row, (request, lane) in enumerate(split.lanes):
        head, block = divmod(lane, plan.column_blocks)
        for column in range(plan.columns):
            token, g = divmod(block * plan.columns + column, plan.group)
            if token < split.new[request]:
                place = int(split.view.query_start[request]) + token, head * plan.group + g
                mapped = merged[row, column].double() @ recipe.output[head].double()
                want[place] = mapped + recipe.value_mean[head].double()
                want_lse[place] = merged_lse[row, column]

    def on(x: torch.Tensor) -> torch.Tensor:
        return x.to(device)

    out = torch.full(want.shape, float("nan"), device=device)
    got_lse = torch.full(want_lse.shape, float("nan"), device=device)
    merge_triton(
        Partials(on(split.partials.output), on(split.partials.lse), plan),
        split.view._replace(seq_lens=on(split.view.seq_lens), query_start=on(split.view.query_start)),
        recipe._replace(output=on(recipe.output), value_mean=on(recipe.value_mean)),
        out,
        got_lse,
    )
    torch.testing.assert_close(out.double().cpu(), want, rtol=1e-4, atol=1e-4, equal_nan=True)
    torch.testing.assert_close(got_lse.double().cpu(), want_lse, rtol=1e-5, atol=1e-4, equal_nan=True)


@pytest.mark.parametrize("programs", [1, 5, 33])
@pytest.mark.parametrize(("group", "bucket", "dim"), SHAPES)
def test_merge(device: str, group: int, bucket: int, dim: int, programs: int) -> None:
    split = random_split(group, bucket, dim, programs)
    lse = split.lse.double()
    merged = (lse.softmax(0)[..., None] * split.parts.double()).sum(0)
    check(split, device, merged, lse.logsumexp(0))


@pytest.mark.gpu
@pytest.mark.parametrize(("group", "bucket", "dim"), SHAPES)
def test_merge_agrees_with_xformers(group: int, bucket: int, dim: int) -> None:
    fmha = pytest.importorskip("xformers.ops.fmha", reason="xformers is not installed")
    split = random_split(group, bucket, dim, programs=5)
    parts = split.parts.cuda()[:, :, None]  # [parts, batch, tokens, heads, D], of one token
    merged, lse = fmha.merge_attentions(parts, split.lse.cuda()[..., None])
    check(split, "cuda", merged[:, 0].cpu(), lse[..., 0].cpu())


def test_graph_batch_is_a_size_that_vllm_captures() -> None:
    sizes = [1, 2, 4, *range(8, 256, 8), *range(256, 513, 16)]  # CompilationConfig.max_cudagraph_capture_size
    for requests in range(1, 513):
        assert graph_batch(requests) == min(size for size in sizes if size >= requests)


@pytest.mark.parametrize(("requests", "processors"), [(3, 10), (3, 5), (5, 20), (5, 10), (9, 30), (9, 10)])
def test_padding_to_the_size_of_a_graph_changes_no_bit(
    device: str, requests: int, processors: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A kernel is chosen by rows a multiprocessor: here the batch's are few enough for one, the graph's are not."""
    case = random_case([350 + 50 * request for request in range(requests)], group=3).to(device)
    padded = graph_batch(requests) - requests
    more = torch.nn.functional.pad
    view = case.view._replace(
        seq_lens=more(case.view.seq_lens, (0, padded)),
        query_start=more(case.view.query_start, (0, padded), value=requests),
        block_table=more(case.view.block_table, (0, 0, 0, padded)),
        window_table=more(case.view.window_table, (0, 0, 0, padded)),
    )
    monkeypatch.setattr(merge, "processor_count", lambda device: processors)
    outputs = []
    for one in (case.view, view):
        partials = decode_triton(case.query, one, case.scale, max_query_len=1, num_splits=5)
        outputs.append(torch.zeros_like(case.query, dtype=torch.float32))
        merge_triton(partials, one, case.recipe, outputs[-1])
    assert torch.equal(*outputs)
