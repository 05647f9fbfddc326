# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The split plan: how a fixed number of programs shares the cache of a batch whose lengths only the device knows.

Every (request, head) has two *items*: its history tiles, then its window blocks. All items lie behind one another on
one line, each as long as the bytes it reads (plus a start-up cost), and the line is cut into equal chunks, one a
program. So one launch of one wave serves every batch, short and long requests mixed, with nothing decided on the host:
every program sums the batch's costs itself, which hides behind the launch before it.
A tile belongs to the program in whose chunk it starts. A program leaves one partial result per item it touches: program
``p`` and item ``i`` use slot ``p + i``, which no other pair uses because both only grow along the line.

"Head" here counts column blocks: the query rows (tokens x head group) of a KV head are split into blocks that fit one
program's registers.
"""

import triton
import triton.language as tl

from oscar_vllm.cache.layout import WINDOW_TOKENS

_BLOCK = tl.constexpr(WINDOW_TOKENS)
REQUESTS = tl.constexpr(128)  # whose costs one step of a sum over the batch holds


@triton.jit
def window_blocks(length, new, sink, recent):
    """(sink blocks, first recent block, recent blocks) of a request's window, in blocks of WINDOW_TOKENS tokens.

    The window of the first query token begins first and is the one that counts.
    """
    start = tl.minimum(tl.maximum(length - new - recent, sink), length)
    first = start // _BLOCK
    sinks = (tl.minimum(sink, length) + _BLOCK - 1) // _BLOCK
    total = (length + _BLOCK - 1) // _BLOCK
    return sinks, first, total - tl.maximum(first, sinks)


@triton.jit
def history_tiles(length, recent, TILE: tl.constexpr):
    """Tiles of the history that are paid for, up to where the last query token's window begins. The last one's owner
    also reads those inside that window, which hold something to read only where window blocks are missing."""
    return tl.maximum((tl.maximum(length - 1 - recent, 0) + TILE - 1) // TILE, 1)


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
    history = ITEM_COST + history_tiles(length, recent, TILE) * TILE_COST
    window = tl.where(blocks > 0, ITEM_COST + blocks * BLOCK_COST, 0)
    return tl.where(live, history, 0), tl.where(live, window, 0)


@triton.jit
def _costs(
    seq_lens, query_start, at, requests, sink, recent, lanes,
    TILE: tl.constexpr, TILE_COST: tl.constexpr, BLOCK_COST: tl.constexpr, ITEM_COST: tl.constexpr,
):  # fmt: skip
    """[REQUESTS] cost of all heads of the requests from ``at`` on (0 beyond the batch)."""
    r = at + tl.arange(0, REQUESTS)
    live = r < requests
    length = tl.load(seq_lens + r, mask=live, other=0)
    new = tl.load(query_start + r + 1, mask=live, other=0) - tl.load(query_start + r, mask=live, other=0)
    history, window = item_costs(length, new, sink, recent, TILE, TILE_COST, BLOCK_COST, ITEM_COST)
    return lanes * (history + window)


@triton.jit
def chunk_of(
    program, seq_lens, query_start, requests, programs, sink, recent, lanes,
    TILE: tl.constexpr, TILE_COST: tl.constexpr, BLOCK_COST: tl.constexpr, ITEM_COST: tl.constexpr,
    MIN_CHUNK: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """(start, end) of a program's chunk of the line, (request, start of that request) in which it begins.

    ``MANY`` batches take more than one step of REQUESTS.
    """
    if MANY:
        total = 0
        for at in tl.range(0, requests, REQUESTS, num_stages=1):
            total += tl.sum(
                _costs(
                    seq_lens, query_start, at, requests, sink, recent, lanes, TILE, TILE_COST, BLOCK_COST, ITEM_COST
                ),
                0,
            )
        cursor = program * tl.maximum((total + programs - 1) // programs, MIN_CHUNK)
        stop = tl.minimum(cursor + tl.maximum((total + programs - 1) // programs, MIN_CHUNK), total)
        request = 0
        start = 0
        behind = 0
        for at in tl.range(0, requests, REQUESTS, num_stages=1):
            costs = _costs(
                seq_lens, query_start, at, requests, sink, recent, lanes, TILE, TILE_COST, BLOCK_COST, ITEM_COST
            )
            before = behind + tl.cumsum(costs, 0) <= cursor
            request += tl.sum(before.to(tl.int32), 0)
            start += tl.sum(tl.where(before, costs, 0), 0)
            behind += tl.sum(costs, 0)
    else:
        costs = _costs(seq_lens, query_start, 0, requests, sink, recent, lanes, TILE, TILE_COST, BLOCK_COST, ITEM_COST)
        ends = tl.cumsum(costs, 0)
        total = tl.sum(costs, 0)
        cursor = program * tl.maximum((total + programs - 1) // programs, MIN_CHUNK)
        stop = tl.minimum(cursor + tl.maximum((total + programs - 1) // programs, MIN_CHUNK), total)
        before = ends <= cursor
        request = tl.sum(before.to(tl.int32), 0)
        start = tl.sum(tl.where(before, costs, 0), 0)
    return cursor, stop, request, start


@triton.jit
def request_starts(
    request, seq_lens, query_start, requests, programs, sink, recent, lanes,
    TILE: tl.constexpr, TILE_COST: tl.constexpr, BLOCK_COST: tl.constexpr, ITEM_COST: tl.constexpr,
    MIN_CHUNK: tl.constexpr, MANY: tl.constexpr,
):  # fmt: skip
    """(chunk, [M] where each ``request`` [M] begins on the line)."""
    if MANY:
        total = 0
        start = tl.zeros_like(request)
        for at in tl.range(0, requests, REQUESTS, num_stages=1):
            costs = _costs(
                seq_lens, query_start, at, requests, sink, recent, lanes, TILE, TILE_COST, BLOCK_COST, ITEM_COST
            )
            before = (at + tl.arange(0, REQUESTS))[None, :] < request[:, None]
            start += tl.sum(tl.where(before, costs[None, :], 0), 1)
            total += tl.sum(costs, 0)
    else:
        costs = _costs(seq_lens, query_start, 0, requests, sink, recent, lanes, TILE, TILE_COST, BLOCK_COST, ITEM_COST)
        start = tl.sum(tl.where(tl.arange(0, REQUESTS)[None, :] < request[:, None], costs[None, :], 0), 1)
        total = tl.sum(costs, 0)
    return tl.maximum((total + programs - 1) // programs, MIN_CHUNK), start


@triton.jit
def request_start(
    request, seq_lens, query_start, requests, programs, sink, recent, lanes,
    TILE: tl.constexpr, TILE_COST: tl.constexpr, BLOCK_COST: tl.constexpr, ITEM_COST: tl.constexpr,
    MIN_CHUNK: tl.constexpr,
):  # fmt: skip
    """(chunk, where one ``request`` begins on the line), for a batch of up to REQUESTS."""
    costs = _costs(seq_lens, query_start, 0, requests, sink, recent, lanes, TILE, TILE_COST, BLOCK_COST, ITEM_COST)
    start = tl.sum(tl.where(tl.arange(0, REQUESTS) < request, costs, 0), 0)
    return tl.maximum((tl.sum(costs, 0) + programs - 1) // programs, MIN_CHUNK), start


@triton.jit
def partial_slots(
    start, chunk, lane, request, length, new, sink, recent,
    lanes, TILE: tl.constexpr, TILE_COST: tl.constexpr, BLOCK_COST: tl.constexpr,
    ITEM_COST: tl.constexpr,
):  # fmt: skip
    """(first slot, slots, gap) of the partials of a lane of a request that begins at ``start`` on the line.

    ``gap`` is a slot between them that nobody owns, or -1.
    """
    history_cost, window_cost = item_costs(length, new, sink, recent, TILE, TILE_COST, BLOCK_COST, ITEM_COST)
    start += lane * (history_cost + window_cost)
    first = start // chunk
    last = (start + tl.maximum(history_cost - 1, 0)) // chunk
    histories = last - first + 1
    window_first = (start + history_cost) // chunk
    window_last = (start + history_cost + window_cost - 1) // chunk
    has_window = window_cost > 0
    count = tl.where(has_window, window_last - first + 2, histories)
    gap = tl.where(has_window & (window_first > last), histories, -1)
    return first + 2 * (request * lanes + lane), count, gap


@triton.jit
def owned(cursor, stop, item_start, COST: tl.constexpr, ITEM_COST: tl.constexpr, count):
    """Range [lo, hi) of the ``count`` tiles of an item that start in [cursor, stop)."""
    body = item_start + ITEM_COST
    lo = (tl.maximum(cursor - body, 0) + COST - 1) // COST
    hi = (tl.maximum(stop - body, 0) + COST - 1) // COST
    return tl.minimum(lo, count), tl.minimum(hi, count)


@triton.jit
def all_present(window_table, window_width, first, stop):
    """Whether every window block [first, stop) of a request is real."""
    missing = stop - tl.minimum(stop, window_width)
    for at in tl.range(first, tl.minimum(stop, window_width), 32, num_stages=1):
        j = at + tl.arange(0, 32)
        entry = tl.load(window_table + j, mask=j < tl.minimum(stop, window_width), other=1)
        missing += tl.sum((entry == 0).to(tl.int32), 0)
    return missing == 0
