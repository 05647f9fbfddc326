# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The split plan: how a fixed number of programs shares the cache of a batch whose lengths only the device knows.

Every (request, head) has two *items*: its history tiles, then its window blocks. All items lie behind one another on
one line, each as long as the bytes it reads (plus a start-up cost), and the line is cut into equal chunks, one a
program. So one launch of one wave serves every batch, short and long requests mixed, with nothing decided on the host.
A tile belongs to the program in whose chunk it starts. A program leaves one partial result per item it touches: program
``p`` and item ``i`` use slot ``p + i``, which no other pair uses because both only grow along the line.

"Head" here counts column blocks: the query rows (tokens x head group) of a KV head are split into blocks that fit one
program's registers.
"""

import triton
import triton.language as tl

from oscar_vllm.cache.layout import WINDOW_TOKENS

_BLOCK = tl.constexpr(WINDOW_TOKENS)


@triton.jit
def window_blocks(length, new, sink, recent):
    """(sink blocks, first recent block, recent blocks) of a request's window, in blocks of WINDOW_TOKENS tokens."""
    start = tl.minimum(tl.maximum(length - new - recent, sink), length)
    first = start // _BLOCK
    sinks = (tl.minimum(sink, length) + _BLOCK - 1) // _BLOCK
    total = (length + _BLOCK - 1) // _BLOCK
    return sinks, first, total - tl.maximum(first, sinks)


@triton.jit
def history_tiles(length, new, recent, TILE: tl.constexpr):
    """Tiles of the history that are paid for. The last one's owner also reads those inside the recent window, which
    hold something to read only where window blocks are missing."""
    return tl.maximum((tl.maximum(length - new - recent, 0) + TILE - 1) // TILE, 1)


@triton.jit
def item_costs(
    length,
    new,
    sink,
    recent,
    TILE: tl.constexpr,
    TILE_COST: tl.constexpr,
    BLOCK_COST: tl.constexpr,
    ITEM_COST: tl.constexpr,
):
    """(history cost, window cost) of each (request, head); both 0 for a request without tokens or queries."""
    sinks, _, recents = window_blocks(length, new, sink, recent)
    blocks = sinks + recents
    live = (length > 0) & (new > 0)
    history = ITEM_COST + history_tiles(length, new, recent, TILE) * TILE_COST
    window = tl.where(blocks > 0, ITEM_COST + blocks * BLOCK_COST, 0)
    return tl.where(live, history, 0), tl.where(live, window, 0)


@triton.jit
def batch_costs(
    seq_lens,
    query_start,
    requests,
    sink,
    recent,
    REQUESTS: tl.constexpr,
    TILE: tl.constexpr,
    TILE_COST: tl.constexpr,
    BLOCK_COST: tl.constexpr,
    ITEM_COST: tl.constexpr,
):
    """[REQUESTS] cost of one head of every request (0 beyond the batch)."""
    r = tl.arange(0, REQUESTS)
    live = r < requests
    length = tl.load(seq_lens + r, mask=live, other=0)
    new = tl.load(query_start + r + 1, mask=live, other=0) - tl.load(query_start + r, mask=live, other=0)
    history, window = item_costs(length, new, sink, recent, TILE, TILE_COST, BLOCK_COST, ITEM_COST)
    return history + window


@triton.jit
def owned(cursor, stop, item_start, COST: tl.constexpr, ITEM_COST: tl.constexpr, count):
    """Range [lo, hi) of the ``count`` tiles of an item that start in [cursor, stop)."""
    body = item_start + ITEM_COST
    lo = (tl.maximum(cursor - body, 0) + COST - 1) // COST
    hi = (tl.maximum(stop - body, 0) + COST - 1) // COST
    return tl.minimum(lo, count), tl.minimum(hi, count)


@triton.jit
def in_window(pos, entry, length, sink, recent_start):
    """Whether a position is read from the window: the one rule of both the history and the window reader."""
    return (pos < length) & ((pos < sink) | (pos >= recent_start)) & (entry != 0)


@triton.jit
def all_present(window_table, window_width, first, stop):
    """Whether every window block [first, stop) of a request is real."""
    missing = stop - tl.minimum(stop, window_width)
    for at in tl.range(first, tl.minimum(stop, window_width), 32, num_stages=1):
        j = at + tl.arange(0, 32)
        entry = tl.load(window_table + j, mask=j < tl.minimum(stop, window_width), other=1)
        missing += tl.sum((entry == 0).to(tl.int32), 0)
    return missing == 0
