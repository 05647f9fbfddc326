"""Short prefills behind a cached context (the rest of a prefix hit, say), cut so that the decode kernels take them.

They read the INT2 pages as they are, once for every eight tokens; unpacking all of the context for a few queries, as
longer prefills do, costs more.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oscar_vllm.backend.packed import send_packed
from oscar_vllm.kernels.decode import MAX_QUERY_TOKENS

SHORT_QUERY = 64
"""Most new tokens of a prefill that is cut."""


@dataclass
class ExtendPlan:
    """Pieces of up to MAX_QUERY_TOKENS query tokens, each a request of its own to the decode kernels."""

    first_token: int
    """Query token of the batch at which the pieces begin."""
    tokens: int
    query_start: torch.Tensor
    """[P + 1] int32 offsets of the pieces' tokens, counted from ``first_token``."""
    seq_lens: torch.Tensor
    """[P] int32 tokens of the piece's request up to and with the piece."""
    block_table: torch.Tensor
    """[P, *] int32 of the builder's own group."""


def count_short(query_start: Sequence[int], seq_lens: Sequence[int]) -> int:
    """How many of the leading prefills have few new tokens and a context.

    Args:
        query_start: [P + 1] offsets of the prefills' query tokens in the batch.
        seq_lens: [P] tokens of each prefill after this step.
    """
    for i, total in enumerate(seq_lens):
        new = query_start[i + 1] - query_start[i]
        if not 0 < new <= SHORT_QUERY or total <= new:
            return i
    return len(seq_lens)


def plan_extends(
    first_request: int, query_start: Sequence[int], seq_lens: Sequence[int], block_table: torch.Tensor
) -> ExtendPlan:
    """Cut requests ``first_request ..`` of a batch; one copy to the device, no synchronization.

    Args:
        first_request: the first of them in the batch.
        query_start: [N + 1] offsets of their query tokens in the batch.
        seq_lens: [N] tokens of each after this step, exact.
        block_table: [requests, *] int32 of the whole batch.
    """
    rows, offsets, lengths = [], [0], []
    for i, total in enumerate(seq_lens):
        new = query_start[i + 1] - query_start[i]
        for start in range(0, new, MAX_QUERY_TOKENS):
            stop = min(start + MAX_QUERY_TOKENS, new)
            rows.append(first_request + i)
            offsets.append(offsets[-1] + stop - start)
            lengths.append(total - new + stop)
    starts, totals, row = send_packed([offsets, lengths, rows], block_table.device)
    return ExtendPlan(query_start[0], offsets[-1], starts, totals, block_table.index_select(0, row))
