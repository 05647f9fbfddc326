# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Merge the decode kernel's partial results by log-sum-exp and map the output back to the model's own space."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from oscar_vllm.kernels.decode.device import dependent_launch, use_dependent_launch
from oscar_vllm.kernels.decode.partials import Partials
from oscar_vllm.kernels.decode.plan import item_costs
from oscar_vllm.kernels.decode.prepare import PLAN_FIELDS
from oscar_vllm.kernels.views import CacheView, LayerRecipe


@triton.jit(do_not_specialize=["requests", "programs"])
def _merge_kernel(
    partial,
    partial_lse,
    line,
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
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    QUERY_LEN: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    D: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COST: tl.constexpr,
    BLOCK_COST: tl.constexpr,
    ITEM_COST: tl.constexpr,
    FIELDS: tl.constexpr,
    ROWS: tl.constexpr,
    PARTS: tl.constexpr,
    SPLITS: tl.constexpr,
    CHANNELS: tl.constexpr,
    HAS_LSE: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS rows (request, query column) of one KV head, CHANNELS output channels.

    PARTS threads-groups share the splits of a row, SPLITS of each in flight; a group's rows follow the other's.
    """
    M: tl.constexpr = ROWS * PARTS
    LANES: tl.constexpr = HEADS * COLUMN_BLOCKS
    head = tl.program_id(1)
    d = tl.arange(0, D)
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    channel = (d % (D // 8)) * 8 + d // (D // 8)  # partials are field-major
    b = tl.load(matrix + head * matrix_stride_head + channel[:, None] * matrix_stride_row + c[None, :])
    offset = tl.load(mean + head * mean_stride_head + c)
    if PDL:  # what comes before does not depend on the decode kernel
        gdc_wait()
    part = tl.arange(0, M) // ROWS
    row = tl.program_id(0) * ROWS + tl.arange(0, M) % ROWS
    request = row // (GROUP * QUERY_LEN)
    column = row % (GROUP * QUERY_LEN)
    inside = request < requests
    first_token = tl.load(query_start + request, mask=inside, other=0)
    new = tl.load(query_start + request + 1, mask=inside, other=0) - first_token
    length = tl.load(seq_lens + request, mask=inside, other=0)
    live = inside & (length > 0) & (column // GROUP < new)

    # Where the decode kernel put the partials of each row: see its plan.
    chunk = tl.load(line + 2)
    start = tl.load(line + programs * FIELDS + request, mask=inside, other=0)
    history_cost, window_cost = item_costs(length, new, sink, recent, TILE, TILE_COST, BLOCK_COST, ITEM_COST)
    lane = head * COLUMN_BLOCKS + column // COLUMNS
    item = 2 * (request * LANES + lane)
    start += lane * (history_cost + window_cost)
    first = start // chunk
    last = (start + tl.maximum(history_cost - 1, 0)) // chunk
    histories = last - first + 1
    window_first = (start + history_cost) // chunk
    window_last = (start + history_cost + window_cost - 1) // chunk
    has_window = window_cost > 0
    count = tl.where(has_window, window_last - first + 2, histories)
    gap = tl.where(has_window & (window_first > last), histories, -1)  # a slot between the two that nobody owns
    first += item

    # Every thread keeps its own channels of a row and walks its share of the splits: nothing crosses threads.
    m = tl.full([M], -1e30, tl.float32)
    l = tl.zeros([M], tl.float32)
    o = tl.zeros([M, D], tl.float32)
    place = first.to(tl.int64) * COLUMNS + column % COLUMNS
    for at in tl.range(0, tl.max(tl.where(live, count, 0), 0), SPLITS * PARTS, num_stages=1):
        m_new = m
        for u in tl.static_range(SPLITS):
            s = at + u * PARTS + part
            there = live & (s < count) & (s != gap)
            e = tl.load(partial_lse + place + s * COLUMNS, mask=there, other=float("-inf"))
            m_new = tl.maximum(m_new, e)
        alpha = tl.exp2(m - m_new)
        l = l * alpha
        o = o * alpha[:, None]
        for u in tl.static_range(SPLITS):
            s = at + u * PARTS + part
            there = live & (s < count) & (s != gap)
            slot = place + s * COLUMNS
            e = tl.load(partial_lse + slot, mask=there, other=float("-inf"))
            x = tl.load(partial + slot[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
            x = tl.where((e == float("-inf"))[:, None], 0.0, x)  # an empty part's output is not written
            weight = tl.exp2(e - m_new)
            l += weight
            o += x * weight[:, None]
        m = m_new
    if PARTS > 1:
        top = tl.max(tl.reshape(m, (PARTS, ROWS)), 0)
        weight = tl.exp2(m - tl.reshape(tl.broadcast_to(top[None, :], (PARTS, ROWS)), (M,)))
        total = tl.sum(tl.reshape(l * weight, (PARTS, ROWS)), 0)
        every = tl.reshape(tl.broadcast_to(total[None, :], (PARTS, ROWS)), (M,))
        o = o * (weight / tl.where(every == 0.0, 1.0, every))[:, None]
    else:
        top = m
        total = l
        o = o / tl.where(l == 0.0, 1.0, l)[:, None]

    y = tl.dot(o, b, input_precision="tf32x3")
    if PARTS > 1:
        y = tl.sum(tl.reshape(y, (PARTS, ROWS, CHANNELS)), 0)
    y += offset[None, :]
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    request = row // (GROUP * QUERY_LEN)
    column = row % (GROUP * QUERY_LEN)
    inside = request < requests
    first_token = tl.load(query_start + request, mask=inside, other=0)
    new = tl.load(query_start + request + 1, mask=inside, other=0) - first_token
    length = tl.load(seq_lens + request, mask=inside, other=0)
    live = inside & (length > 0) & (column // GROUP < new)
    token = (first_token + column // GROUP).to(tl.int64)
    query_head = head * GROUP + column % GROUP
    place = token * out_stride_token + query_head * out_stride_head
    tl.store(out + place[:, None] + c[None, :], y.to(out.dtype.element_ty), mask=live[:, None])
    if HAS_LSE:
        if tl.program_id(2) == 0:
            natural = (top + tl.log2(tl.where(total == 0.0, 1.0, total))) * 0.6931471805599453
            tl.store(lse + token * lse_stride_token + query_head, natural, mask=live)


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
    block = min(16, triton.next_power_of_2(rows))
    row_blocks = triton.cdiv(rows, block)
    channels = 32 if row_blocks * heads <= 64 else 64
    grid = (row_blocks, heads, dim // channels)
    _merge_kernel[grid](
        partials.output,
        partials.lse,
        partials.line,
        recipe.output,
        recipe.value_mean,
        view.seq_lens,
        view.query_start,
        out,
        lse,
        requests,
        plan.programs,
        view.sink,
        view.recent,
        recipe.output.stride(0),
        recipe.output.stride(1),
        recipe.value_mean.stride(0),
        out.stride(0),
        out.stride(1),
        0 if lse is None else lse.stride(0),
        HEADS=heads,
        GROUP=plan.group,
        QUERY_LEN=plan.max_query_len,
        COLUMNS=plan.columns,
        COLUMN_BLOCKS=plan.column_blocks,
        D=dim,
        TILE=plan.tile,
        TILE_COST=plan.tile_cost,
        BLOCK_COST=plan.block_cost,
        ITEM_COST=plan.item_cost,
        FIELDS=PLAN_FIELDS,
        ROWS=block,
        PARTS=16 // block,
        SPLITS=8 if dim <= 128 else 4,
        CHANNELS=channels,
        HAS_LSE=lse is not None,
        PDL=use_dependent_launch(out.device),
        num_warps=8,
        **dependent_launch(out.device),
    )
