# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Device code: attention of one program's query columns over a range of 16-bit window blocks."""

import triton
import triton.language as tl

from oscar_vllm.cache.layout import WINDOW_TOKENS
from oscar_vllm.kernels.decode.columns import await_queries, column_limits, prefetch_l2
from oscar_vllm.kernels.decode.plan import window_blocks

_BLOCK = tl.constexpr(WINDOW_TOKENS)


@triton.jit
def _two_halves(x, DTYPE: tl.constexpr):
    """float32 -> two 16-bit tensors whose sum keeps at least 16 bits of it."""
    high = x.to(DTYPE)
    return high, (x - high.to(tl.float32)).to(DTYPE)


@triton.jit
def _dot(a, b, acc, FLOAT_DOT: tl.constexpr):
    """16-bit product on tensor cores, or in float32 for the interpreter, which takes bfloat16 for integers."""
    if FLOAT_DOT:
        return tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")
    else:  # noqa: RET505 (device code: the branch is chosen when it is compiled)
        return tl.dot(a, b, acc)


@triton.jit
def window_item(
    halves,
    factors,
    window,
    window_table,
    window_width,
    acc,
    lse,
    lo,
    hi,
    length,
    new,
    first_column,
    group,
    columns,
    sink,
    recent,
    stride_block,
    stride_slot,
    D: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    FLOAT_DOT: tl.constexpr,
    PDL: tl.constexpr,
):
    """Attend over the blocks [lo, hi) of one request's window (sink blocks, then recent ones) and store the partial.

    ``halves`` and ``factors`` point at the lane's operands, ``window`` at the head's rows of block 0, ``window_table``
    at the request's row, ``acc`` and ``lse`` at the partial's slot. Queries and probabilities go to the tensor cores as
    two 16-bit halves, so the result is float32-like whatever the model's dtype.
    """
    DTYPE: tl.constexpr = window.dtype.element_ty
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    t = tl.arange(0, _BLOCK)
    sinks, first_recent, _ = window_blocks(length, new, sink, recent)
    at = tl.where(lo < sinks, lo, first_recent + lo - sinks)
    entry = tl.load(window_table + at, mask=(lo < hi) & (at < window_width), other=0)
    limit = column_limits(n, first_column, length, new, group, columns)
    real = (n < columns)[None, :]
    if PDL:
        prefetch_l2(window + entry.to(tl.int64) * stride_block, _BLOCK * 4 * D, D // 2)
        await_queries()
    q_high = tl.load(halves + n[None, :] * D + d[:, None], mask=real, other=0.0)
    q_low = tl.load(halves + (n[None, :] + N) * D + d[:, None], mask=real, other=0.0)
    to_log2 = tl.load(factors + 2 * N + n, mask=n < columns, other=0.0)
    m = tl.full([N], -1e30, tl.float32)
    norm = tl.zeros([_BLOCK, N], tl.float32)
    a = tl.zeros([D, N], tl.float32)
    for j in tl.range(lo, hi, num_stages=STAGES):
        pos = at * _BLOCK + t
        # A block is sink or not as a whole. Which recent rows a column reads depends on its token: it reaches back so
        # far from its limit. The first token reaches back furthest.
        of_sink = at * _BLOCK < sink
        first = tl.where(of_sink, 0, length - new - recent)
        reach = tl.where(of_sink, length, recent + 1)
        # The interpreter broadcasts a boolean scalar to int32: broadcast the entry instead.
        here = (pos < length) & (pos >= first) & (entry + tl.zeros_like(pos) != 0)
        rows = window + entry.to(tl.int64) * stride_block
        after = tl.minimum(j + 1, hi - 1)
        at = tl.where(after < sinks, after, first_recent + after - sinks)
        entry = tl.load(window_table + at, mask=at < window_width, other=0)
        keys = tl.load(rows + t[:, None] * stride_slot + d[None, :], mask=here[:, None], other=0.0)
        # As with the history's values, the pointer tile is transposed and shared memory turns it.
        values = tl.load(rows + D + t[None, :] * stride_slot + d[:, None], mask=here[None, :], other=0.0)
        s = _dot(keys, q_high, tl.zeros([_BLOCK, N], tl.float32), FLOAT_DOT)
        s = _dot(keys, q_low, s, FLOAT_DOT)
        ok = here[:, None] & (pos[:, None] < limit[None, :]) & (pos[:, None] + reach >= limit[None, :])
        s = tl.where(ok, s, -1e30)
        m_new = tl.maximum(m, tl.max(s, 0))
        alpha = tl.exp2((m - m_new) * to_log2)
        p = tl.where(ok, tl.exp2((s - m_new[None, :]) * to_log2[None, :]), 0.0)
        norm = norm * alpha[None, :] + p
        p_high, p_low = _two_halves(p, DTYPE)
        a = _dot(values, p_high, a * alpha[None, :], FLOAT_DOT)
        a = _dot(values, p_low, a, FLOAT_DOT)
        m = m_new

    norm = tl.sum(norm, 0)
    some = ~(norm == 0.0)  # true for NaN
    a = a / tl.where(some, norm, 1.0)[None, :]
    place = (d % 8) * (D // 8) + d // 8
    tl.store(acc + n[None, :] * D + place[:, None], a, mask=(n < columns)[None, :])
    log2_sum = tl.where(some, m * to_log2 + tl.log2(tl.where(some, norm, 1.0)), float("-inf"))
    tl.store(lse + n, log2_sum, mask=n < columns)
