# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Triton decode attention: one launch over sink, history and recent of every request, its splits merged by a second."""

import torch
import triton
import triton.language as tl

from oscar_vllm.cache.layout import WINDOW_TOKENS
from oscar_vllm.kernels.decode.columns import await_queries
from oscar_vllm.kernels.decode.device import dependent_launch, use_dependent_launch, use_inline_ptx
from oscar_vllm.kernels.decode.history import history_item
from oscar_vllm.kernels.decode.partials import Partials
from oscar_vllm.kernels.decode.plan import (
    REQUESTS,
    all_present,
    chunk_of,
    history_tiles,
    item_costs,
    owned,
    window_blocks,
)
from oscar_vllm.kernels.decode.prepare import NewTokens, prepare
from oscar_vllm.kernels.decode.shape import split_plan, tile_shape
from oscar_vllm.kernels.decode.window import window_item
from oscar_vllm.kernels.launch import Launch
from oscar_vllm.kernels.merge.triton import merge_triton
from oscar_vllm.kernels.views import CacheView, LayerRecipe

BLOCK = tl.constexpr(WINDOW_TOKENS)
# Numbers of models and batches: one binary a head size and dtype serves them all.
_UNSPECIALIZED = [
    "requests", "programs", "table_stride", "window_table_stride", "window_width",
    "heads", "group", "columns", "column_blocks",
]  # fmt: skip


@triton.jit(do_not_specialize=_UNSPECIALIZED)
def _decode_kernel(
    codes,
    halves,
    factors,
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
    heads,
    group,
    columns,
    column_blocks,
    D: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    RATIO: tl.constexpr,
    TILE_COST: tl.constexpr,
    BLOCK_COST: tl.constexpr,
    ITEM_COST: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
    STAGES: tl.constexpr,
    WINDOW_STAGES: tl.constexpr,
    MANY: tl.constexpr,
    ASM: tl.constexpr,
    FLOAT_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """One program takes its chunk of the line (see ``plan.py``), item after item."""
    TILE: tl.constexpr = ROWS * RATIO
    lanes = heads * column_blocks
    program = tl.program_id(0)
    cursor, stop, request, start = chunk_of(
        program, seq_lens, query_start, requests, programs, sink, recent, lanes,
        TILE, TILE_COST, BLOCK_COST, ITEM_COST, MIN_CHUNK, MANY,
    )  # fmt: skip
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
            head = lane // column_blocks
            first_column = (lane % column_blocks) * columns
            operand = (request * lanes + lane).to(tl.int64)
            slot = program + 2 * operand
            blocks = block_table + request.to(tl.int64) * table_stride
            window_blocks_of = window_table + request.to(tl.int64) * window_table_stride
            if cursor < lane_start + history_cost:
                tiles = history_tiles(length, recent, TILE)
                lo, hi = owned(cursor, stop, lane_start, TILE_COST, ITEM_COST, tiles)
                if (lo < tiles) & (hi == tiles):
                    # Tiles inside every token's recent window hold something to read only where blocks are missing.
                    last_start = tl.maximum(length - 1 - recent, 0)
                    whole = all_present(
                        window_blocks_of, window_width, last_start // BLOCK, (length + BLOCK - 1) // BLOCK
                    )
                    hi = (tl.where(whole, last_start, length) + TILE - 1) // TILE
                if lo < sink // TILE:  # likewise those inside the sink
                    sink_end = (tl.minimum(sink, length) + BLOCK - 1) // BLOCK
                    lo = tl.where(all_present(window_blocks_of, window_width, 0, sink_end), sink // TILE, lo)
                if lo < hi:
                    history_item(
                        codes + operand * (2 * D * N), factors + operand * (3 * N),
                        history + head.to(tl.int64) * history_stride_head,
                        blocks, window_blocks_of, window_width,
                        output + slot * (columns * D), lse + slot * columns,
                        lo, hi, length, new, first_column, group, columns, sink, recent, history_stride_block,
                        D, N, ROWS, RATIO, STAGES, ASM, PDL,
                    )  # fmt: skip
                else:
                    _store_empty(output + slot * (columns * D), lse + slot * columns, columns, D, N)
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
                        output + slot * (columns * D), lse + slot * columns,
                        lo, hi, length, new, first_column, group, columns, sink, recent,
                        window_stride_block, window_stride_slot,
                        D, N, WINDOW_STAGES, FLOAT_DOT, PDL,
                    )  # fmt: skip
                else:
                    _store_empty(output + slot * (columns * D), lse + slot * columns, columns, D, N)
                cursor = lane_start + cost
            if (cursor >= lane_start + cost) & (lane == lanes - 1):
                request += 1
                start = lane_start + cost
    if PDL:  # so that the end of this grid also means the end of the one before it
        await_queries()


@triton.jit
def _store_empty(output, lse, columns, D: tl.constexpr, N: tl.constexpr):
    n = tl.arange(0, N)
    there = n < columns
    tl.store(lse + n, tl.full([N], float("-inf"), tl.float32), mask=there)
    tl.store(output + n[:, None] * D + tl.arange(0, D)[None, :], tl.zeros([N, D], tl.float32), mask=there[:, None])


_decode = Launch(_decode_kernel)


def decode_triton(
    query: torch.Tensor,
    view: CacheView,
    scale: float,
    *,
    max_query_len: int,
    num_splits: int | None = None,
    transform: torch.Tensor | None = None,
    new: NewTokens | None = None,
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
        new: this step's tokens where they are still to be written.

    Returns:
        Partial results for :func:`merge_triton`, in transformed space.
    """
    heads = view.history.shape[1]
    requests = view.seq_lens.shape[0]
    dim = query.shape[2]
    plan = split_plan(view, query, max_query_len, num_splits)
    shape = tile_shape(dim, plan.columns)
    slots = plan.programs + 2 * requests * heads * plan.column_blocks
    output = torch.empty(slots, plan.columns, dim, dtype=torch.float32, device=query.device)
    lse = torch.empty(slots, plan.columns, dtype=torch.float32, device=query.device)
    operands = prepare(query, view, scale, plan, transform, new)
    _decode(
        (plan.programs, 1, 1),
        *operands, view.history, view.window, view.block_table, view.window_table, view.seq_lens, view.query_start,
        output, lse, requests, plan.programs, view.sink, view.recent,
        *view.history.stride()[:2], *view.window.stride()[:3],
        view.block_table.stride(0), view.window_table.stride(0), view.window_table.shape[1],
        heads, plan.group, plan.columns, plan.column_blocks,
        dim, shape.columns_pad, shape.rows, shape.ratio,
        plan.tile_cost, plan.block_cost, plan.item_cost, plan.min_chunk,
        shape.stages, shape.window_stages, requests > REQUESTS.value,
        use_inline_ptx(query.device), query.device.type == "cpu", use_dependent_launch(query.device),
        num_warps=shape.warps, **dependent_launch(query.device),
    )  # fmt: skip
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
    if view.seq_lens.shape[0] == 0:
        return
    partials = decode_triton(query, view, scale, max_query_len=max_query_len, transform=recipe.query)
    merge_triton(partials, view, recipe, out, lse)


def decode_step_triton(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    view: CacheView,
    slots: torch.Tensor,
    window_slots: torch.Tensor,
    recipe: LayerRecipe,
    scale: float,
    *,
    max_query_len: int,
    out: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Write the new tokens of a decode batch and attend, in three launches.

    The same as :func:`write_triton` followed by :func:`attend_triton`, whose arguments these are.
    """
    if view.seq_lens.shape[0] == 0:
        return
    new = NewTokens(key, value, slots, window_slots, recipe)
    partials = decode_triton(query, view, scale, max_query_len=max_query_len, transform=recipe.query, new=new)
    merge_triton(partials, view, recipe, out, lse)
