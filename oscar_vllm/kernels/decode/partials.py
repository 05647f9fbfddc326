"""What the decode kernel hands to the merge: partial attention results and the split plan that placed them."""

from typing import NamedTuple

import torch


class SplitPlan(NamedTuple):
    """The host's share of the split plan: numbers that depend on shapes only, never on sequence lengths."""

    programs: int
    """Programs of the decode kernel; each takes an equal share of the batch's cost."""
    tile: int
    """Tokens of a history tile."""
    tile_cost: int
    """Cost of a history tile, in units of 512 bytes read."""
    block_cost: int
    """Cost of a window block in the same unit."""
    item_cost: int
    """Cost of starting on another (request, head) or on its window."""
    min_chunk: int
    """Least cost of a program's share: below it, fewer programs work."""
    group: int
    """Query heads per KV head."""
    max_query_len: int
    """Query tokens per request are at most this (1, 2, 4 or 8)."""
    columns_pad: int
    """Columns that the kernel computes: 8 or 16."""
    columns: int
    """Query columns (token, head of the group) of a column block."""
    column_blocks: int
    """Column blocks of a (request, head)."""


class Partials(NamedTuple):
    """Normalized attention over disjoint parts of the cache; which slot holds what follows from the plan.

    Slots that no program owns are never written; an empty part has log-sum-exp -inf.
    """

    output: torch.Tensor
    """[slots, columns, D] float32; channel c lies at ``(c % 8) * (D / 8) + c // 8`` (field-major, as codes unpack)."""
    lse: torch.Tensor
    """[slots, columns] float32, base 2."""
    plan: SplitPlan
