# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Query columns: the (token, head of the group) pairs of one KV head that one program attends for."""

import triton
import triton.language as tl


@triton.jit
def column_limits(column, first_column, length, new, GROUP: tl.constexpr, COLUMNS: tl.constexpr):
    """Each column sees the positions below its limit: token ``i`` of ``n`` sees ``length - n + i + 1``."""
    token = (first_column + column) // GROUP
    return tl.where((column < COLUMNS) & (token < new), length - new + token + 1, 0)
