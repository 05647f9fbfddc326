# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Device code: attention of one program's query columns over a range of INT2 history tiles.

One warp, so that the tensor cores take their A operand from registers, where the codes are unpacked:

- scores: int8 codes times the query in 16-bit integers (a high and a low int8 column), exact in int32; a token's scale
  and the query's channel sum times its minimum are applied to the score, never to the codes;
- output: fp16 codes (see ``unpack.py``), transposed while they are loaded, times the probabilities, which carry the
  token's value scale; the minimum contributes ``sum(p * minimum)`` to every channel alike.

Probabilities are scaled by 2**8 against fp16 underflow, so a value's scale must not exceed MAX_VALUE_SCALE; the write
kernel sees to that. A tile is ``ROWS`` rows of ``RATIO`` tokens (two tokens a row at D = 64, so that
a row is never under 32 bytes); with RATIO 2 the columns hold the even tokens' probabilities, then the odd tokens'.
"""

import triton
import triton.language as tl

from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS
from oscar_vllm.kernels.decode.columns import await_queries, column_limits, prefetch_l2
from oscar_vllm.kernels.decode.unpack import key_field, meta_minimum, meta_scale, value_field

_BLOCK = tl.constexpr(WINDOW_TOKENS)


@triton.jit
def _query_operand(codes, columns, FIELD: tl.constexpr, D: tl.constexpr, N: tl.constexpr, RATIO: tl.constexpr):  # fmt: skip # noqa: E501
    """int8 operand [bytes of a row, RATIO * N * 2] of one code field; columns are (token of the row, column, half)."""
    BYTES: tl.constexpr = D // 4
    x = tl.arange(0, RATIO * N * 2)
    k = tl.arange(0, BYTES * RATIO)
    there = ((x % (2 * N)) < 2 * columns)[None, :] & ((x // (2 * N))[None, :] == (k // BYTES)[:, None])
    place = (FIELD * 2 * N + x % (2 * N))[None, :] * BYTES + (k % BYTES)[:, None]
    return tl.load(codes + place, mask=there, other=0)


@triton.jit
def _read_above(pos, PARITY: tl.constexpr, window_table, window_width, length, sink, recent):
    """The limit above which a column reads the tokens ``pos + PARITY`` of a tile's rows from the history.

    Where the window has them, a column leaves them to it up to that limit, which no column exceeds in the sink. The
    table's entry may be stale between the sink and every column's window: there all limits lie above either way.
    """
    at = pos // _BLOCK  # the tokens of a row share a window block
    entry = tl.load(window_table + at, mask=(pos < length) & (at < window_width), other=0)
    pos += PARITY
    until = tl.where(entry == 0, 0, tl.where(pos < sink, length, pos + recent + 1))
    return tl.maximum(pos, until)


@triton.jit
def _tile(
    base,
    row,
    pos,
    special,
    window_table,
    window_width,
    length,
    sink,
    recent,
    limit,
    q0,
    q1,
    q2,
    q3,
    q_sum,
    to_log2,
    m,
    norm,
    z,
    a0,
    a1,
    a2,
    a3,
    a4,
    a5,
    a6,
    a7,
    D: tl.constexpr,
    ROWS: tl.constexpr,
    N: tl.constexpr,
    RATIO: tl.constexpr,
    ASM: tl.constexpr,
    PAGE: tl.constexpr = PAGE_TOKENS,
):
    """Online-softmax step over one tile; ``special`` tiles also hold tokens that some column must not see here."""
    WORDS: tl.constexpr = D // 8 * RATIO  # uint16 words of a row
    PAGE_ROWS: tl.constexpr = PAGE // RATIO
    t = tl.arange(0, ROWS)
    b16 = base.to(tl.pointer_type(tl.uint16))
    b32 = base.to(tl.pointer_type(tl.uint32))
    b64 = base.to(tl.pointer_type(tl.uint64))
    keys = tl.load(base + row * 2 * WORDS + t[:, None] * (2 * WORDS) + tl.arange(0, 2 * WORDS)[None, :])
    # The pointer tile is transposed, so the load lands in shared memory as the page has it and is read transposed.
    w = tl.arange(0, WORDS)
    values = tl.load(b16 + PAGE_ROWS * WORDS + row * WORDS + t[None, :] * WORDS + w[:, None])
    if RATIO == 1:
        k_meta = tl.load(b32 + PAGE_ROWS * WORDS + row + t)
        v_meta = tl.load(b32 + PAGE_ROWS * WORDS + PAGE_ROWS + row + t)
    else:
        k_pair = tl.load(b64 + PAGE_ROWS * WORDS // 2 + row + t)
        v_pair = tl.load(b64 + PAGE_ROWS * WORDS // 2 + PAGE_ROWS + row + t)
        k_meta = k_pair.to(tl.uint32)
        v_meta = v_pair.to(tl.uint32)
        k_odd = (k_pair >> 32).to(tl.uint32)
        v_odd = (v_pair >> 32).to(tl.uint32)
    s = tl.dot(key_field(keys, 0, ASM), q0, out_dtype=tl.int32)
    s = tl.dot(key_field(keys, 1, ASM), q1, s, out_dtype=tl.int32)
    s = tl.dot(key_field(keys, 2, ASM), q2, s, out_dtype=tl.int32)
    s = tl.dot(key_field(keys, 3, ASM), q3, s, out_dtype=tl.int32)
    high, low = tl.split(tl.reshape(s, (ROWS, RATIO * N, 2)))
    s = (high * 256 + low).to(tl.float32)
    if RATIO == 1:
        s = s * meta_scale(k_meta)[:, None] + meta_minimum(k_meta)[:, None] * q_sum[None, :]
        if special:
            above = _read_above(pos, 0, window_table, window_width, length, sink, recent)
            s = tl.where(above[:, None] < limit[None, :], s, -1e30)
            # What no token reads, the last one included, may be NaN, and 0 * NaN must not reach a sum.
            v_meta = tl.where(above < length, v_meta, 0)
        top = tl.max(s, 0)
    else:
        s, s_odd = tl.split(tl.permute(tl.reshape(s, (ROWS, 2, N)), (0, 2, 1)))
        s = s * meta_scale(k_meta)[:, None] + meta_minimum(k_meta)[:, None] * q_sum[None, :]
        s_odd = s_odd * meta_scale(k_odd)[:, None] + meta_minimum(k_odd)[:, None] * q_sum[None, :]
        if special:
            above = _read_above(pos, 0, window_table, window_width, length, sink, recent)
            odd = _read_above(pos, 1, window_table, window_width, length, sink, recent)
            s = tl.where(above[:, None] < limit[None, :], s, -1e30)
            s_odd = tl.where(odd[:, None] < limit[None, :], s_odd, -1e30)
            v_meta = tl.where(above < length, v_meta, 0)
            v_odd = tl.where(odd < length, v_odd, 0)
        top = tl.max(tl.maximum(s, s_odd), 0)
    m_new = tl.maximum(m, top)
    alpha = tl.exp2((m - m_new) * to_log2)
    # A column that has seen nothing yet keeps every p at 0: -1e30 * to_log2 - 0 underflows.
    shift = tl.where(m_new <= -1e29, 0.0, m_new * to_log2 - 8.0)[None, :]
    p = tl.exp2(s * to_log2[None, :] - shift)
    p_sum = p
    p_min = p * meta_minimum(v_meta)[:, None]
    pv = p * meta_scale(v_meta)[:, None]
    if RATIO == 2:
        p_odd = tl.exp2(s_odd * to_log2[None, :] - shift)
        p_sum += p_odd
        p_min += p_odd * meta_minimum(v_odd)[:, None]
        pv_odd = p_odd * meta_scale(v_odd)[:, None]
        pv = tl.reshape(tl.permute(tl.join(pv, pv_odd), (0, 2, 1)), (ROWS, RATIO * N))
    # Summed over the 16-row pieces only: what is left crosses lanes once, after the last tile.
    norm = norm * alpha[None, :] + tl.sum(tl.reshape(p_sum, (ROWS // 16, 16, N)), 0)
    z = z * alpha[None, :] + tl.sum(tl.reshape(p_min, (ROWS // 16, 16, N)), 0)
    pv = pv.to(tl.float16)
    if RATIO == 2:
        alpha = tl.reshape(tl.broadcast_to(alpha[None, :], (2, N)), (2 * N,))
    alpha = alpha[None, :]
    a0 = tl.dot(value_field(values, 0, ASM), pv, a0 * alpha)
    a1 = tl.dot(value_field(values, 1, ASM), pv, a1 * alpha)
    a2 = tl.dot(value_field(values, 2, ASM), pv, a2 * alpha)
    a3 = tl.dot(value_field(values, 3, ASM), pv, a3 * alpha)
    a4 = tl.dot(value_field(values, 4, ASM), pv, a4 * alpha)
    a5 = tl.dot(value_field(values, 5, ASM), pv, a5 * alpha)
    a6 = tl.dot(value_field(values, 6, ASM), pv, a6 * alpha)
    a7 = tl.dot(value_field(values, 7, ASM), pv, a7 * alpha)
    return m_new, norm, z, a0, a1, a2, a3, a4, a5, a6, a7


@triton.jit
def _store_field(
    acc, a, FIELD: tl.constexpr, factor, offset, columns, D: tl.constexpr, N: tl.constexpr, RATIO: tl.constexpr,
):  # fmt: skip
    """Write field ``FIELD``'s D/8 channels of every column; field-major, see ``Partials``."""
    WORDS: tl.constexpr = D // 8
    n = tl.arange(0, N)
    if RATIO == 2:  # even tokens' words meet their probabilities in the first half of the columns, odd in the second
        even, odd = tl.split(tl.permute(tl.reshape(a, (2 * WORDS, 2, N)), (0, 2, 1)))
        first = (tl.arange(0, 2 * WORDS) < WORDS)[:, None]
        a = tl.sum(tl.reshape(tl.where(first, even, odd), (2, WORDS, N)), 0)
    place = n[None, :] * D + FIELD * WORDS + tl.arange(0, WORDS)[:, None]
    tl.store(acc + place, a * factor[None, :] + offset[None, :], mask=(n < columns)[None, :])


@triton.jit
def history_item(
    codes,
    factors,
    pages,
    table,
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
    D: tl.constexpr,
    N: tl.constexpr,
    ROWS: tl.constexpr,
    RATIO: tl.constexpr,
    STAGES: tl.constexpr,
    ASM: tl.constexpr,
    PDL: tl.constexpr,
    PAGE: tl.constexpr = PAGE_TOKENS,
):
    """Attend over history tiles [lo, hi) of one request and head and store the partial result.

    ``codes`` and ``factors`` point at the lane's operands, ``pages`` at the head's page of block 0, ``table`` and
    ``window_table`` at the request's rows, ``acc`` and ``lse`` at the partial's slot.
    """
    TILE: tl.constexpr = ROWS * RATIO
    PER_PAGE: tl.constexpr = PAGE // TILE
    WORDS: tl.constexpr = D // 8 * RATIO
    n = tl.arange(0, N)
    block = tl.load(table + lo // PER_PAGE)
    limit = column_limits(n, first_column, length, new, group, columns)
    if PDL:
        prefetch_l2(pages + block.to(tl.int64) * stride_block, PAGE * (D // 2 + 8), 64 if D == 64 else 128)
        await_queries()
    q_sum = tl.load(factors + n, mask=n < columns, other=0.0)
    to_log2 = tl.load(factors + N + n, mask=n < columns, other=0.0)
    q0 = _query_operand(codes, columns, 0, D, N, RATIO)
    q1 = _query_operand(codes, columns, 1, D, N, RATIO)
    q2 = _query_operand(codes, columns, 2, D, N, RATIO)
    q3 = _query_operand(codes, columns, 3, D, N, RATIO)
    m = tl.full([N], -1e30, tl.float32)
    norm = tl.zeros([16, N], tl.float32)
    z = tl.zeros([16, N], tl.float32)
    a0 = tl.zeros([WORDS, N * RATIO], tl.float32)
    a1 = tl.zeros([WORDS, N * RATIO], tl.float32)
    a2 = tl.zeros([WORDS, N * RATIO], tl.float32)
    a3 = tl.zeros([WORDS, N * RATIO], tl.float32)
    a4 = tl.zeros([WORDS, N * RATIO], tl.float32)
    a5 = tl.zeros([WORDS, N * RATIO], tl.float32)
    a6 = tl.zeros([WORDS, N * RATIO], tl.float32)
    a7 = tl.zeros([WORDS, N * RATIO], tl.float32)

    # Tiles [plain, plain_end) lie between the sink and every column's window: every column reads every token here.
    # The others take a branch, not a loop of their own: at short contexts they are half of all tiles, and loads that
    # are not fetched ahead would cost more than the branch.
    plain = (sink + TILE - 1) // TILE
    plain_end = tl.maximum(length - new - recent, 0) // TILE
    for i in tl.range(lo, hi, num_stages=STAGES):
        base = pages + block.to(tl.int64) * stride_block
        block = tl.load(table + tl.minimum(i + 1, hi - 1) // PER_PAGE)
        pos = i * TILE + tl.arange(0, ROWS) * RATIO
        m, norm, z, a0, a1, a2, a3, a4, a5, a6, a7 = _tile(
            base, (i % PER_PAGE) * ROWS, pos, (i < plain) | (i >= plain_end),
            window_table, window_width, length, sink, recent, limit, q0, q1, q2, q3, q_sum, to_log2,
            m, norm, z, a0, a1, a2, a3, a4, a5, a6, a7, D, ROWS, N, RATIO, ASM,
        )  # fmt: skip

    norm = tl.sum(norm, 0)
    z = tl.sum(z, 0)
    some = ~(norm == 0.0)  # true for NaN
    inverse = 1.0 / tl.where(some, norm, 1.0)
    offset_all = z * inverse
    unit = inverse * 16777216.0  # fields 0..4 carry 4**field * 2**-24, fields 5..7 start over
    _store_field(acc, a0, 0, unit, offset_all, columns, D, N, RATIO)
    _store_field(acc, a1, 1, unit * 0.25, offset_all, columns, D, N, RATIO)
    _store_field(acc, a2, 2, unit * 0.0625, offset_all, columns, D, N, RATIO)
    _store_field(acc, a3, 3, unit * 0.015625, offset_all, columns, D, N, RATIO)
    _store_field(acc, a4, 4, unit * 0.00390625, offset_all, columns, D, N, RATIO)
    _store_field(acc, a5, 5, unit, offset_all, columns, D, N, RATIO)
    _store_field(acc, a6, 6, unit * 0.25, offset_all, columns, D, N, RATIO)
    _store_field(acc, a7, 7, unit * 0.0625, offset_all, columns, D, N, RATIO)
    log2_sum = tl.where(some, m * to_log2 + tl.log2(tl.where(some, norm, 1.0)) - 8.0, float("-inf"))
    tl.store(lse + n, log2_sum, mask=n < columns)
