# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""What every item of the decode kernel begins with: its query columns, and the wait for their operands."""

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


@triton.jit
def prefetch_l2(base, BYTES: tl.constexpr, LANES: tl.constexpr):
    """Ask for (up to 128 * LANES of) the BYTES from ``base`` on: the first reads then overlap with the wait.

    The launch before may still write there: the L2 cache is where its stores go, so nothing stale is kept.
    """
    LINE: tl.constexpr = 128
    line = tl.minimum(tl.arange(0, LANES), BYTES // LINE - 1)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [base.to(tl.uint64) + LINE * line.to(tl.uint64)],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )
