"""How the cached context of a step's prefills is cut into tiles that fit a workspace of fixed size."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch

from oscar_vllm.backend.packed import send_packed
from oscar_vllm.cache.layout import PAGE_TOKENS

WORKSPACE_BYTES = 256 * 2**20
"""Dequantized keys and values of one tile, whatever the context: 65,536 tokens of 8 KV heads of 128 channels."""


def tile_tokens(num_kv_heads: int, head_size: int) -> int:
    """Context tokens of one tile: as many whole pages as WORKSPACE_BYTES hold in 16 bits, at least one."""
    page = PAGE_TOKENS * num_kv_heads * head_size * 4
    return max(1, WORKSPACE_BYTES // page) * PAGE_TOKENS


@dataclass
class ContextTile:
    """Consecutive pieces of the contexts of some consecutive requests, one piece a request."""

    first_token: int
    """First and last + 1 query token, counted from the first prefill's first."""
    last_token: int
    tokens: int
    """Context tokens of all pieces."""
    longest: int
    """Tokens of the longest piece."""
    longest_query: int
    """Query tokens of the longest request."""
    rows: torch.Tensor
    """[N] int32 row of each piece's request in the batch."""
    starts: torch.Tensor
    """[N] int32 first context position of each piece."""
    cu_tokens: torch.Tensor
    """[N + 1] int32 offsets of the pieces in the tile."""
    cu_query: torch.Tensor
    """[N + 1] int32 offsets of the requests' query tokens, counted from ``first_token``."""


@dataclass
class PrefillPlan:
    """What the layers of a step need to know of its prefills, on the device; made once a step."""

    first_token: int
    """Query token of the batch at which the prefills begin."""
    tokens: int
    longest_query: int
    query_start: torch.Tensor
    """[P + 1] int32 offsets of the prefills' query tokens, counted from ``first_token``."""
    tiles: list[ContextTile]


def cut_context(contexts: Sequence[int], size: int) -> list[list[tuple[int, int, int]]]:
    """Fill tiles of ``size`` tokens with the contexts of requests, in order.

    Args:
        contexts: cached tokens before each request's chunk.
        size: tokens of a tile.

    Returns:
        Per tile the pieces (request, first position, tokens), each request at most once and every tile but the last
        full, so that their number is the least possible.
    """
    tiles: list[list[tuple[int, int, int]]] = []
    room = 0
    for request, context in enumerate(contexts):
        start = 0
        while start < context:
            if room == 0:
                tiles.append([])
                room = size
            taken = min(room, context - start)
            tiles[-1].append((request, start, taken))
            start, room = start + taken, room - taken
    return tiles


def plan_prefill(
    first_request: int,
    query_start: Sequence[int],
    seq_lens: Sequence[int],
    size: int,
    device: torch.device,
) -> PrefillPlan:
    """Plan requests ``first_request ..`` of a batch; one copy to the device, no synchronization.

    Args:
        first_request: the first prefill's row in the batch.
        query_start: [P + 1] offsets of the prefills' query tokens in the batch.
        seq_lens: [P] tokens of each prefill after this step, exact.
        size: context tokens of a tile.
        device: where the layers compute.
    """
    queries = [stop - start for start, stop in pairwise(query_start)]
    contexts = [max(0, total - new) if new else 0 for total, new in zip(seq_lens, queries, strict=True)]
    pieces = cut_context(contexts, size)
    base = query_start[0]
    arrays = [[start - base for start in query_start]]
    for tile in pieces:
        covered = range(tile[0][0], tile[-1][0] + 1)
        taken = {request: (start, count) for request, start, count in tile}
        offsets = [0]
        for request in covered:  # one without context in between has an empty piece
            offsets.append(offsets[-1] + taken.get(request, (0, 0))[1])
        arrays += [
            [first_request + request for request in covered],
            [taken.get(request, (0, 0))[0] for request in covered],
            offsets,
            [query_start[request] - query_start[covered.start] for request in range(covered.start, covered.stop + 1)],
        ]
    parts = send_packed(arrays, device)
    tiles = []
    for i, tile in enumerate(pieces):
        first, last = tile[0][0], tile[-1][0]
        rows, starts, cu_tokens, cu_query = parts[1 + 4 * i : 5 + 4 * i]
        tiles.append(
            ContextTile(
                first_token=query_start[first] - base,
                last_token=query_start[last + 1] - base,
                tokens=sum(count for _, _, count in tile),
                longest=max(count for _, _, count in tile),
                longest_query=max(queries[first : last + 1]),
                rows=rows,
                starts=starts,
                cu_tokens=cu_tokens,
                cu_query=cu_query,
            )
        )
    return PrefillPlan(base, query_start[-1] - base, max(queries), parts[0], tiles)
