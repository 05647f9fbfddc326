# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Triton decode attention: one launch over sink, history and recent of every request, its splits merged by a second."""

from functools import cache

import torch
import triton
import triton.language as tl

from oscar_vllm.cache.layout import WINDOW_TOKENS, PageLayout
from oscar_vllm.kernels.decode.history import history_item
from oscar_vllm.kernels.decode.partials import Partials, SplitPlan
from oscar_vllm.kernels.decode.plan import batch_costs, chunk_size, history_tiles, item_costs, owned, window_blocks
from oscar_vllm.kernels.decode.window import window_item
from oscar_vllm.kernels.merge.triton import merge_triton
from oscar_vllm.kernels.transform.triton import transform_queries_triton
from oscar_vllm.kernels.views import CacheView, LayerRecipe

COST_BYTES = 512


@triton.jit(do_not_specialize=["requests", "programs"])
def _decode_kernel(
    query,
    history,
    window,
    block_table,
    window_table,
    seq_lens,
    query_start,
    output,
    lse,
    requests,
    programs,
    scale,
    sink,
    recent,
    query_stride_token,
    query_stride_head,
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
    REQUESTS: tl.constexpr,
    TILE_COST: tl.constexpr,
    BLOCK_COST: tl.constexpr,
    ITEM_COST: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW_STAGES: tl.constexpr,
    ASM: tl.constexpr,
    FLOAT_DOT: tl.constexpr,
):
    TILE: tl.constexpr = ROWS * RATIO
    LANES: tl.constexpr = HEADS * COLUMN_BLOCKS
    program = tl.program_id(0)
    costs = batch_costs(
        seq_lens, query_start, requests, sink, recent, REQUESTS, TILE, TILE_COST, BLOCK_COST, ITEM_COST
    )
    ends = tl.cumsum(costs, 0) * LANES
    total = tl.sum(costs, 0) * LANES
    chunk = chunk_size(total, programs, MIN_CHUNK)
    cursor = program * chunk
    stop = tl.minimum(cursor + chunk, total)
    request = tl.sum((ends <= cursor).to(tl.int32), 0)
    start = tl.sum(tl.where(ends <= cursor, costs, 0), 0) * LANES  # where the request begins on the line
    while cursor < stop:
        first_token = tl.load(query_start + request)
        new = tl.load(query_start + request + 1) - first_token
        length = tl.load(seq_lens + request)
        history_cost, window_cost = item_costs(
            length, new, sink, recent, TILE, TILE_COST, BLOCK_COST, ITEM_COST
        )
        cost = history_cost + window_cost
        if cost == 0:
            request += 1
        else:
            lane = (cursor - start) // cost
            lane_start = start + lane * cost
            head = lane // COLUMN_BLOCKS
            first_column = (lane % COLUMN_BLOCKS) * COLUMNS
            item = 2 * (request * LANES + lane)
            if cursor < lane_start + history_cost:
                slot = (program + item).to(tl.int64)
                tiles = history_tiles(length, new, recent, TILE)
                lo, hi = owned(cursor, stop, lane_start, TILE_COST, ITEM_COST, tiles)
                if (lo < tiles) & (hi == tiles):
                    hi = (length + TILE - 1) // TILE
                history_item(
                    query,
                    history + head.to(tl.int64) * history_stride_head,
                    block_table + request.to(tl.int64) * table_stride,
                    window_table + request.to(tl.int64) * window_table_stride,
                    window_width,
                    output + slot * (COLUMNS * D),
                    lse + slot * COLUMNS,
                    lo, hi, length, new, first_token, head, first_column, scale, sink, recent,
                    query_stride_token, query_stride_head, history_stride_block,
                    D, GROUP, COLUMNS, N, ROWS, RATIO, STAGES, ASM,
                )  # fmt: skip
                cursor = lane_start + history_cost
            else:
                slot = (program + item + 1).to(tl.int64)
                sinks, _, recents = window_blocks(length, new, sink, recent)
                lo, hi = owned(cursor, stop, lane_start + history_cost, BLOCK_COST, ITEM_COST, sinks + recents)
                window_item(
                    query,
                    window + head.to(tl.int64) * window_stride_head,
                    window_table + request.to(tl.int64) * window_table_stride,
                    window_width,
                    output + slot * (COLUMNS * D),
                    lse + slot * COLUMNS,
                    lo, hi, length, new, first_token, head, first_column, scale, sink, recent,
                    query_stride_token, query_stride_head, window_stride_block, window_stride_slot,
                    D, GROUP, COLUMNS, N, WINDOW_STAGES, FLOAT_DOT,
                )  # fmt: skip
                cursor = lane_start + cost
            if cursor >= lane_start + cost:
                if lane == LANES - 1:
                    request += 1
                    start = lane_start + cost


@cache
def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 2


@cache
def use_inline_ptx(device: torch.device) -> bool:
    """Whether kernels on this device may hold inline PTX (not in the interpreter, not on other vendors' GPUs)."""
    return device.type == "cuda" and torch.version.hip is None


class _Shape:
    """Compile-time shape of the decode kernel for one head size and number of query columns."""

    def __init__(self, head_size: int, columns: int) -> None:
        self.ratio = 2 if head_size == 64 else 1
        self.columns_pad = 8 if columns <= 8 else 16
        wide = self.columns_pad == 16 or head_size == 256
        tokens = 64 if wide else 128
        self.rows = tokens // self.ratio
        self.stages = 3
        self.window_stages = 3
        self.warps_per_sm = 8


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
        programs=programs or shape.warps_per_sm * _multiprocessors(query.device),
        tile=tile,
        tile_cost=tile_cost,
        block_cost=WINDOW_TOKENS * 4 * dim // COST_BYTES,
        item_cost=tile_cost,
        min_chunk=3 * tile_cost,
        requests_pad=triton.next_power_of_2(view.seq_lens.shape[0]),
        group=group,
        max_query_len=bucket,
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
) -> Partials:
    """Partial attention results of a batch of decodes over everything in the caches, this step's tokens included.

    Args:
        query: [T, Hq, D] transformed queries, the tokens of R requests in order; float32, or the window's dtype. Token
            i of the n of a request sees positions below ``length - n + i + 1``.
        view: the caches and tables of the R requests.
        scale: softmax scale.
        max_query_len: most query tokens of a request, at most 8.
        num_splits: programs that share the batch; one wave of the device by default.

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
    _decode_kernel[(plan.programs,)](
        query,
        view.history,
        view.window,
        view.block_table,
        view.window_table,
        view.seq_lens,
        view.query_start,
        output,
        lse,
        requests,
        plan.programs,
        scale,
        view.sink,
        view.recent,
        query.stride(0),
        query.stride(1),
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
        REQUESTS=plan.requests_pad,
        TILE_COST=plan.tile_cost,
        BLOCK_COST=plan.block_cost,
        ITEM_COST=plan.item_cost,
        MIN_CHUNK=plan.min_chunk,
        STAGES=shape.stages,
        WINDOW_STAGES=shape.window_stages,
        ASM=use_inline_ptx(query.device),
        FLOAT_DOT=query.device.type == "cpu",
        num_warps=1,
    )
    return Partials(output, lse, plan)


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
    # Kept in float32: transformed queries are not representable in the model's dtype without loss.
    transformed = torch.empty(query.shape, dtype=torch.float32, device=query.device)
    transform_queries_triton(query, recipe.query, transformed)
    partials = decode_triton(transformed, view, scale, max_query_len=max_query_len)
    merge_triton(partials, view, recipe, out, lse)
