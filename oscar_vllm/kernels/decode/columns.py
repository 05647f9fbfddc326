# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Query columns: the (token, head of the group) pairs of one KV head that one program attends for."""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait


@triton.jit
def column_limits(column, first_column, length, new, group, columns):
    """Each column sees the positions below its limit: token ``i`` of ``n`` sees ``length - n + i + 1``."""
    token = (first_column + column) // group
    return tl.where((column < columns) & (token < new), length - new + token + 1, 0)


@triton.jit
def await_queries():
    """Wait for the launch that makes the query operands; from then on the merge may start. Again is free.

    Called as late as can be: lengths and tables come from before that launch and are fetched while it runs.
    """
    gdc_wait()
    gdc_launch_dependents()
