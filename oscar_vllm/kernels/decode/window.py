# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Device code: attention of one program's query columns over a range of 16-bit window blocks."""

import triton
import triton.language as tl

from oscar_vllm.cache.layout import WINDOW_TOKENS
from oscar_vllm.kernels.decode.columns import column_limits, column_offsets
from oscar_vllm.kernels.decode.plan import in_window, window_blocks

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
    else:
        return tl.dot(a, b, acc)


@triton.jit
def window_item(
    query,
    window,
    window_table,
    window_width,
    acc,
    lse,
    lo,
    hi,
    length,
    new,
    first_token,
    head,
    first_column,
    scale,
    sink,
    recent,
    query_stride_token,
    query_stride_head,
    stride_block,
    stride_slot,
    D: tl.constexpr,
    GROUP: tl.constexpr,
    COLUMNS: tl.constexpr,
    N: tl.constexpr,
    STAGES: tl.constexpr,
    FLOAT_DOT: tl.constexpr,
):
    """Attend over the blocks [lo, hi) of one request's window (sink blocks, then recent ones) and store the partial.

    ``window`` points at the head's rows of block 0, ``window_table`` at the request's row, ``acc`` and ``lse`` at the
    partial's slot. Probabilities, and queries finer than the cache, go to the tensor cores as two 16-bit halves, so the
    result is float32-like whatever the model's dtype.
    """
    DTYPE: tl.constexpr = window.dtype.element_ty
    SPLIT_QUERY: tl.constexpr = query.dtype.element_ty != DTYPE
    n = tl.arange(0, N)
    d = tl.arange(0, D)
    offset, exists = column_offsets(
        n, first_column, new, first_token, head, query_stride_token, query_stride_head, GROUP, COLUMNS
    )
    limit = column_limits(n, first_column, length, new, GROUP, COLUMNS)
    q = tl.load(query + offset[None, :] + d[:, None], mask=exists[None, :], other=0.0)
    to_log2 = tl.full([N], 1.4426950408889634, tl.float32) * scale
    if SPLIT_QUERY:
        q = q.to(tl.float32)
        top = tl.maximum(tl.max(tl.abs(q), 0), 1e-20)
        q_high, q_low = _two_halves(q / top[None, :], DTYPE)
        to_log2 = to_log2 * top
    else:
        q_high = q
        q_low = q
    m = tl.full([N], -1e30, tl.float32)
    l = tl.zeros([_BLOCK, N], tl.float32)
    a = tl.zeros([D, N], tl.float32)

    sinks, first_recent, _ = window_blocks(length, new, sink, recent)
    recent_start = length - new - recent
    t = tl.arange(0, _BLOCK)
    for j in tl.range(lo, hi, num_stages=STAGES):
        at = tl.where(j < sinks, j, first_recent + j - sinks)
        entry = tl.load(window_table + at, mask=at < window_width, other=0)
        pos = at * _BLOCK + t
        # The interpreter broadcasts a boolean scalar to int32: broadcast the entry instead.
        here = in_window(pos, entry + tl.zeros_like(pos), length, sink, recent_start)
        rows = window + entry.to(tl.int64) * stride_block + t[:, None] * stride_slot + d[None, :]
        keys = tl.load(rows, mask=here[:, None], other=0.0)
        values = tl.load(rows + D, mask=here[:, None], other=0.0)
        ok = here[:, None] & (pos[:, None] < limit[None, :])
        s = _dot(keys, q_high, tl.zeros([_BLOCK, N], tl.float32), FLOAT_DOT)
        if SPLIT_QUERY:
            s = _dot(keys, q_low, s, FLOAT_DOT)
        s = tl.where(ok, s, -1e30)
        m_new = tl.maximum(m, tl.max(s, 0))
        alpha = tl.exp2((m - m_new) * to_log2)
        p = tl.where(ok, tl.exp2((s - m_new[None, :]) * to_log2[None, :]), 0.0)
        l = l * alpha[None, :] + p
        p_high, p_low = _two_halves(p, DTYPE)
        turned = tl.trans(values)
        a = _dot(turned, p_high, a * alpha[None, :], FLOAT_DOT)
        a = _dot(turned, p_low, a, FLOAT_DOT)
        m = m_new

    l = tl.sum(l, 0)
    some = ~(l == 0.0)  # true for NaN
    a = a / tl.where(some, l, 1.0)[None, :]
    place = (d % 8) * (D // 8) + d // 8
    tl.store(acc + n[None, :] * D + place[:, None], a, mask=(n < COLUMNS)[None, :])
    log2_sum = tl.where(some, m * to_log2 + tl.log2(tl.where(some, l, 1.0)), float("-inf"))
    tl.store(lse + n, log2_sum, mask=n < COLUMNS)
