# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Merge the decode kernel's partial results by log-sum-exp and map the output back to the model's own space."""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from oscar_vllm.kernels.decode.device import dependent_launch, use_dependent_launch
from oscar_vllm.kernels.decode.partials import Partials
from oscar_vllm.kernels.decode.plan import REQUESTS, partial_slots, request_starts
from oscar_vllm.kernels.launch import Launch, cdiv, next_power_of_2
from oscar_vllm.kernels.merge.row import merge_row_kernel
from oscar_vllm.kernels.rows_triton import processor_count
from oscar_vllm.kernels.views import CacheView, LayerRecipe


@triton.jit
def _repeat(x, ROWS: tl.constexpr, PARTS: tl.constexpr):
    """[ROWS] -> [PARTS * ROWS], one copy after another."""
    if PARTS == 1:
        return x
    else:  # noqa: RET505 (device code: the branch is chosen when it is compiled)
        return tl.reshape(tl.broadcast_to(x[None, :], (PARTS, ROWS)), (PARTS * ROWS,))


@triton.jit(
    do_not_specialize=[
        "requests",
        "programs",
        "lse_stride_token",
        "heads",
        "group",
        "query_len",
        "columns",
        "column_blocks",
    ]
)
def _merge_kernel(
    partial,
    partial_lse,
    matrix,
    mean,
    seq_lens,
    query_start,
    out,
    lse,
    requests,
    programs,
    sink,
    recent,
    matrix_stride_head,
    matrix_stride_row,
    mean_stride_head,
    out_stride_token,
    out_stride_head,
    lse_stride_token,
    heads,
    group,
    query_len,
    columns,
    column_blocks,
    D: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COST: tl.constexpr,
    BLOCK_COST: tl.constexpr,
    ITEM_COST: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    SLOTS: tl.constexpr,
    STAGES: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    MANY: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows (request, query column) of one KV head, CHANNELS output channels.

    Weights come from the log-sum-exps alone; then PARTS groups of threads share the splits of the rows.
    """
    M: tl.constexpr = ROWS * PARTS
    lanes = heads * column_blocks
    head = tl.program_id(1)
    d = tl.arange(0, D)
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    channel = (d % (D // 8)) * 8 + d // (D // 8)  # partials are field-major
    b = tl.load(matrix + head * matrix_stride_head + channel[:, None] * matrix_stride_row + c[None, :])
    offset = tl.load(mean + head * mean_stride_head + c)
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = row // (group * query_len)
    column = row % (group * query_len)
    inside = request < requests
    first_token = tl.load(query_start + request, mask=inside, other=0)
    new = tl.load(query_start + request + 1, mask=inside, other=0) - first_token
    length = tl.load(seq_lens + request, mask=inside, other=0)
    live = inside & (length > 0) & (column // group < new)
    chunk, start = request_starts(
        request, seq_lens, query_start, requests, programs, sink, recent, lanes,
        TILE, TILE_COST, BLOCK_COST, ITEM_COST, MIN_CHUNK, MANY,
    )  # fmt: skip
    slot, count, gap = partial_slots(
        start, chunk, head * column_blocks + column // columns, request, length, new, sink, recent,
        lanes, TILE, TILE_COST, BLOCK_COST, ITEM_COST,
    )  # fmt: skip
    count = tl.where(live, count, 0)
    place = slot.to(tl.int64) * columns + column % columns
    most = tl.max(count, 0)
    if PDL:  # what comes before does not depend on the decode kernel
        gdc_wait()

    m = tl.full([ROWS], -1e30, tl.float32)
    norm = tl.zeros([ROWS], tl.float32)
    for at in tl.range(0, most, SLOTS, num_stages=1):
        s = at + tl.arange(0, SLOTS)[:, None]
        there = (s < count[None, :]) & (s != gap[None, :])
        e = tl.load(partial_lse + place[None, :] + s * columns, mask=there, other=float("-inf"))
        m_new = tl.maximum(m, tl.max(e, 0))
        norm = norm * tl.exp2(m - m_new) + tl.sum(tl.exp2(e - m_new[None, :]), 0)
        m = m_new
    total = tl.where(norm == 0.0, 1.0, norm)

    # Every thread keeps its own channels of a row and walks its share of the splits: nothing crosses threads.
    part = tl.arange(0, M) // ROWS
    top = _repeat(m, ROWS, PARTS)
    count = _repeat(count, ROWS, PARTS)
    gap = _repeat(gap, ROWS, PARTS)
    slot = _repeat(place, ROWS, PARTS) + part * columns
    o = tl.zeros([M, D], tl.float32)
    for i in tl.range(0, (most + PARTS - 1) // PARTS, num_stages=STAGES):
        s = i * PARTS + part
        there = (s < count) & (s != gap)
        e = tl.load(partial_lse + slot, mask=there, other=float("-inf"))
        x = tl.load(partial + slot[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
        weight = tl.exp2(e - top)
        # No weight must not mean 0 * garbage.
        o += tl.where((e == float("-inf"))[:, None], 0.0, x * weight[:, None])
        slot += PARTS * columns
    o = o / _repeat(total, ROWS, PARTS)[:, None]

    y = tl.dot(o, b, input_precision="tf32x3")
    if PARTS > 1:
        y = tl.sum(tl.reshape(y, (PARTS, ROWS, CHANNELS)), 0)
    y += offset[None, :]
    token = (first_token + column // group).to(tl.int64)
    query_head = head * group + column % group
    place = token * out_stride_token + query_head * out_stride_head
    tl.store(out + place[:, None] + c[None, :], y.to(out.dtype.element_ty), mask=live[:, None])
    if HAS_LSE:  # noqa: SIM102
        if tl.program_id(2) == 0:
            natural = (m + tl.log2(total)) * 0.6931471805599453
            tl.store(lse + token * lse_stride_token + query_head, natural, mask=live)


_merge = Launch(_merge_kernel)
_merge_row = Launch(merge_row_kernel)


def graph_batch(requests: int) -> int:
    """Requests of the CUDA graph that vLLM, by its default sizes, replays for a batch of so many.

    What is chosen by this number is chosen alike with and without graphs, so that their outputs agree bit for bit.
    """
    step = 8 if requests <= 256 else 16
    return next_power_of_2(requests) if requests <= 4 else cdiv(requests, step) * step


def merge_triton(
    partials: Partials, view: CacheView, recipe: LayerRecipe, out: torch.Tensor, lse: torch.Tensor | None = None
) -> None:
    """Combine a decode's partials, leave transformed space: ``o @ output[h] + value_mean[h]``.

    Args:
        partials: what :func:`decode_triton` returned for this batch.
        view: the same view.
        recipe: the layer's transforms.
        out: [T, Hq, D] any float dtype, last dimension contiguous; rows of no request are left alone.
        lse: [T, Hq] float32 natural log-sum-exp of the scores, last dimension contiguous, or None.
    """
    plan = partials.plan
    heads = recipe.output.shape[0]
    dim = out.shape[2]
    requests = view.seq_lens.shape[0]
    rows = requests * plan.group * plan.max_query_len
    expected = graph_batch(requests) * plan.group * plan.max_query_len
    processors = processor_count(out.device)
    # With few rows each gets programs of its own; beyond that their copies of the matrix cost more than they gain.
    if expected * heads <= processors and requests <= REQUESTS.value:
        _merge_rows(partials, view, recipe, out, lse, 64, 64 if dim <= 128 else 32)
        return
    if expected * heads <= 2 * processors and requests <= REQUESTS.value and dim <= 128:
        _merge_rows(partials, view, recipe, out, lse, dim, 16)
        return
    # The fewer rows, the more splits each has: threads that are not needed for rows share the splits.
    per_processor = cdiv(expected * heads, processors)
    block = min(4 if per_processor <= 2 else 8 if per_processor <= 4 else 16, next_power_of_2(expected))
    channels = 64
    _merge(
        (cdiv(rows, block), heads, dim // channels),
        *_shared(partials, view, recipe, out, lse), block, 16 // block, 64, 6 if dim <= 128 else 4, channels,
        lse is not None, requests > REQUESTS.value, use_dependent_launch(out.device),
        num_warps=8, **dependent_launch(out.device),
    )  # fmt: skip


def _shared(
    partials: Partials, view: CacheView, recipe: LayerRecipe, out: torch.Tensor, lse: torch.Tensor | None
) -> tuple[Any, ...]:
    """The arguments that both kernels begin with."""
    plan = partials.plan
    return (
        partials.output, partials.lse, recipe.output, recipe.value_mean, view.seq_lens, view.query_start, out, lse,
        view.seq_lens.shape[0], plan.programs, view.sink, view.recent,
        recipe.output.stride(0), recipe.output.stride(1), recipe.value_mean.stride(0),
        out.stride(0), out.stride(1), 0 if lse is None else lse.stride(0),
        recipe.output.shape[0], plan.group, plan.max_query_len, plan.columns, plan.column_blocks, out.shape[2],
        plan.tile, plan.tile_cost, plan.block_cost, plan.item_cost, plan.min_chunk,
    )  # fmt: skip


def _merge_rows(
    partials: Partials,
    view: CacheView,
    recipe: LayerRecipe,
    out: torch.Tensor,
    lse: torch.Tensor | None,
    channels: int,
    splits: int,
) -> None:
    """:func:`merge_triton` for few rows: a program for ``channels`` of one row, ``splits`` partials at a time."""
    plan = partials.plan
    heads = recipe.output.shape[0]
    dim = out.shape[2]
    requests = view.seq_lens.shape[0]
    _merge_row(
        (requests * plan.group * plan.max_query_len, heads, dim // channels),
        *_shared(partials, view, recipe, out, lse), splits, channels,
        lse is not None, use_dependent_launch(out.device), num_warps=8, **dependent_launch(out.device),
    )  # fmt: skip
