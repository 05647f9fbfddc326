# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Triton decode attention: one launch over sink, history and recent of every request, its splits merged by a second."""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscar_vllm.cache.layout import WINDOW_TOKENS, PageLayout
from oscar_vllm.kernels.decode.device import dependent_launch, multiprocessors, use_dependent_launch, use_inline_ptx
from oscar_vllm.kernels.decode.history import history_item
from oscar_vllm.kernels.decode.partials import Partials, SplitPlan
from oscar_vllm.kernels.decode.plan import all_present, history_tiles, item_costs, owned, window_blocks
from oscar_vllm.kernels.decode.prepare import PLAN_FIELDS, prepare
from oscar_vllm.kernels.decode.window import window_item
from oscar_vllm.kernels.merge.triton import merge_triton
from oscar_vllm.kernels.views import CacheView, LayerRecipe

BLOCK = tl.constexpr(WINDOW_TOKENS)
COST_BYTES = 512


@triton.jit(do_not_specialize=["programs"])
def _decode_kernel(
    codes,
    halves,
    factors,
    plan,
    history,
    window,
    block_table,
    window_table,
    seq_lens,
    query_start,
    output,
    lse,
    sink,
    recent,
    history_stride_block,
    history_stride_head,
    window_stride_block,
    window_stride_head,
    window_stride_slot,
    table_stride,
    window_table_stride,
    window_width,
    HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    COLUMN_BLOCKS: tl.constexpr,
    D: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    RATIO: tl.constexpr,
    TILE_COST: tl.constexpr,
    BLOCK_COST: tl.constexpr,
    ITEM_COST: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW_STAGES: tl.constexpr,
    FIELDS: tl.constexpr,
    ASM: tl.constexpr,
    FLOAT_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program takes its chunk of the line (see ``plan.py``), item after item."""
    TILE: tl.constexpr = ROWS * RATIO
    LANES: tl.constexpr = HEADS * COLUMN_BLOCKS
    program = tl.program_id(0)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    request = tl.load(plan + program * FIELDS)
    start = tl.load(plan + program * FIELDS + 1)  # where the request begins on the line
    chunk = tl.load(plan + program * FIELDS + 2)
    total = tl.load(plan + program * FIELDS + 3)
    cursor = program * chunk
    stop = tl.minimum(cursor + chunk, total)
    while cursor < stop:
        new = tl.load(query_start + request + 1) - tl.load(query_start + request)
        length = tl.load(seq_lens + request)
        history_cost, window_cost = item_costs(length, new, sink, recent, TILE, TILE_COST, BLOCK_COST, ITEM_COST)
        cost = history_cost + window_cost
        if cost == 0:
            request += 1
        else:
            lane = (cursor - start) // cost
            lane_start = start + lane * cost
            head = lane // COLUMN_BLOCKS
            first_column = (lane % COLUMN_BLOCKS) * COLUMNS
            operand = (request * LANES + lane).to(tl.int64)
            slot = program + 2 * operand
            blocks = block_table + request.to(tl.int64) * table_stride
            window_blocks_of = window_table + request.to(tl.int64) * window_table_stride
            if cursor < lane_start + history_cost:
                tiles = history_tiles(length, new, recent, TILE)
                lo, hi = owned(cursor, stop, lane_start, TILE_COST, ITEM_COST, tiles)
                if (lo < tiles) & (hi == tiles):
                    # Tiles inside the recent window hold something to read only where its blocks are missing.
                    recent_start = tl.maximum(length - new - recent, 0)
                    whole = all_present(
                        window_blocks_of, window_width, recent_start // BLOCK, (length + BLOCK - 1) // BLOCK
                    )
                    hi = (tl.where(whole, recent_start, length) + TILE - 1) // TILE
                if lo < sink // TILE:  # likewise those inside the sink
                    sink_end = (tl.minimum(sink, length) + BLOCK - 1) // BLOCK
                    lo = tl.where(all_present(window_blocks_of, window_width, 0, sink_end), sink // TILE, lo)
                if lo < hi:
                    history_item(
                        codes + operand * (2 * D * N), factors + operand * (3 * N),
                        history + head.to(tl.int64) * history_stride_head,
                        blocks, window_blocks_of, window_width,
                        output + slot * (COLUMNS * D), lse + slot * COLUMNS,
                        lo, hi, length, new, first_column, sink, recent, history_stride_block,
                        D, GROUP, COLUMNS, N, ROWS, RATIO, STAGES, ASM,
                    )  # fmt: skip
                else:
                    _store_empty(output + slot * (COLUMNS * D), lse + slot * COLUMNS, COLUMNS, D, N)
                cursor = lane_start + history_cost
            else:
                slot += 1
                sinks, _, recents = window_blocks(length, new, sink, recent)
                lo, hi = owned(cursor, stop, lane_start + history_cost, BLOCK_COST, ITEM_COST, sinks + recents)
                if lo < hi:
                    window_item(
                        halves + operand * (2 * N * D), factors + operand * (3 * N),
                        window + head.to(tl.int64) * window_stride_head,
                        window_blocks_of, window_width,
                        output + slot * (COLUMNS * D), lse + slot * COLUMNS,
                        lo, hi, length, new, first_column, sink, recent, window_stride_block, window_stride_slot,
                        D, GROUP, COLUMNS, N, WINDOW_STAGES, FLOAT_DOT,
                    )  # fmt: skip
                else:
                    _store_empty(output + slot * (COLUMNS * D), lse + slot * COLUMNS, COLUMNS, D, N)
                cursor = lane_start + cost
            if (cursor >= lane_start + cost) & (lane == LANES - 1):
                request += 1
                start = lane_start + cost


@triton.jit
def _store_empty(output, lse, COLUMNS: tl.constexpr, D: tl.constexpr, N: tl.constexpr):
    n = tl.arange(0, N)
    there = n < COLUMNS
    tl.store(lse + n, tl.full([N], float("-inf"), tl.float32), mask=there)
    tl.store(output + n[:, None] * D + tl.arange(0, D)[None, :], tl.zeros([N, D], tl.float32), mask=there[:, None])


class _Shape:
    """Compile-time shape of the decode kernel for one head size and number of query columns."""

    def __init__(self, head_size: int, columns: int) -> None:
        self.ratio = 2 if head_size == 64 else 1
        self.columns_pad = 8 if columns <= 8 else 16
        wide = self.columns_pad == 16 or head_size == 256
        self.rows = (64 if wide else 128) // self.ratio
        # One warp has registers enough for everything but wide heads with many columns.
        self.warps = 2 if self.columns_pad == 16 and head_size == 256 else 1
        self.stages = 3
        self.window_stages = 2
        # With about 250 registers a thread, each quarter of a multiprocessor holds two warps: one wave is this many.
        self.programs_per_processor = 8 // self.warps


def split_plan(view: CacheView, query: torch.Tensor, max_query_len: int, programs: int | None = None) -> SplitPlan:
    """Plan for a batch's shapes; ``programs`` defaults to one wave of the device."""
    heads = view.history.shape[1]
    group = query.shape[1] // heads
    dim = query.shape[2]
    bucket = triton.next_power_of_2(max_query_len)
    total = group * bucket
    blocks = triton.cdiv(total, 16)
    columns = triton.cdiv(total, blocks)
    shape = _Shape(dim, columns)
    tile = shape.rows * shape.ratio
    tile_cost = tile * PageLayout(dim).token_bytes // COST_BYTES
    return SplitPlan(
        programs=programs or shape.programs_per_processor * multiprocessors(query.device),
        tile=tile,
        tile_cost=tile_cost,
        block_cost=WINDOW_TOKENS * 4 * dim // COST_BYTES,
        item_cost=tile_cost // 2,
        min_chunk=2 * tile_cost,
        requests_pad=triton.next_power_of_2(view.seq_lens.shape[0]),
        group=group,
        max_query_len=bucket,
        columns_pad=shape.columns_pad,
        columns=columns,
        column_blocks=blocks,
    )


def decode_triton(
    query: torch.Tensor,
    view: CacheView,
    scale: float,
    *,
    max_query_len: int,
    num_splits: int | None = None,
    transform: torch.Tensor | None = None,
) -> Partials:
    """Partial attention results of a batch of decodes over everything in the caches, this step's tokens included.

    Args:
        query: [T, Hq, D] queries of any float dtype, last dimension contiguous, the tokens of R requests in order.
            Token i of the n of a request sees positions below ``length - n + i + 1``.
        view: the caches and tables of the R requests.
        scale: softmax scale.
        max_query_len: most query tokens of a request, at most 8.
        num_splits: programs that share the batch; one wave of the device by default.
        transform: [H, D, D] float32 for ``query[:, h * G + g] @ transform[h]``; None where queries are transformed.

    Returns:
        Partial results for :func:`merge_triton`, in transformed space.
    """
    heads = view.history.shape[1]
    requests = view.seq_lens.shape[0]
    dim = query.shape[2]
    plan = split_plan(view, query, max_query_len, num_splits)
    shape = _Shape(dim, plan.columns)
    slots = plan.programs + 2 * requests * heads * plan.column_blocks
    output = torch.empty(slots, plan.columns, dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(slots, plan.columns, dtype=torch.float32, device=query.device)
    operands = prepare(query, view, scale, plan, transform)
    _decode_kernel[(plan.programs,)](
        operands.codes,
        operands.halves,
        operands.factors,
        operands.plan,
        view.history,
        view.window,
        view.block_table,
        view.window_table,
        view.seq_lens,
        view.query_start,
        output,
        lse,
        view.sink,
        view.recent,
        view.history.stride(0),
        view.history.stride(1),
        view.window.stride(0),
        view.window.stride(1),
        view.window.stride(2),
        view.block_table.stride(0),
        view.window_table.stride(0),
        view.window_table.shape[1],
        HEADS=heads,
        GROUP=plan.group,
        COLUMNS=plan.columns,
        COLUMN_BLOCKS=plan.column_blocks,
        D=dim,
        N=shape.columns_pad,
        ROWS=shape.rows,
        RATIO=shape.ratio,
        TILE_COST=plan.tile_cost,
        BLOCK_COST=plan.block_cost,
        ITEM_COST=plan.item_cost,
        STAGES=shape.stages,
        WINDOW_STAGES=shape.window_stages,
        FIELDS=PLAN_FIELDS,
        ASM=use_inline_ptx(query.device),
        FLOAT_DOT=query.device.type == "cpu",
        PDL=use_dependent_launch(query.device),
        num_warps=shape.warps,
        **dependent_launch(query.device),
    )
    return Partials(output, lse, operands.plan, plan)


def attend_triton(
    query: torch.Tensor,
    view: CacheView,
    recipe: LayerRecipe,
    scale: float,
    *,
    max_query_len: int,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Decode attention of a batch: query transform, splits, merge. Arguments as in :func:`attend_reference`.

    No host synchronization and fixed grids: a captured CUDA graph serves every length up to the block table's width.
    """
    if view.seq_lens.shape[0] == 0:
        return
    partials = decode_triton(query, view, scale, max_query_len=max_query_len, transform=recipe.query)
    merge_triton(partials, view, recipe, out, lse)
