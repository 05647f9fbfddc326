# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The two-bit quantizer on rows held in registers: range, clip threshold, least-squares refit, gain.

A code is found with one saturating multiply-add and one that rounds: ``MAGIC + 3 * clamp(t, 0, 1)`` has the code in the
low bits of a float32, so nothing is converted.
"""

import triton
import triton.language as tl

MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds a small float32 to an integer in the low bits
STEP = tl.constexpr(0.95)  # as in the twin
OUTLYING = tl.constexpr(9.0)
MAGIC_WORD = tl.constexpr(0x3C400000)  # sixteen MAGICs in a word of codes, modulo 2^32
HALF_UP = tl.constexpr(1.2e-7)  # of a third of a code: ties round up as floor(x + 0.5) does
HALF_MAX = tl.constexpr(65504.0)


@triton.jit
def _nearest(x, slope, offset, ASM: tl.constexpr):
    """MAGIC + clamp(round(3 * (x * slope + offset)), 0, 3): the code is in the low bits."""
    if ASM:
        third = tl.inline_asm_elementwise(
            "fma.rn.sat.f32 $0, $1, $2, $3;", "=f,f,f,f", [x, slope, offset], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        third = x * slope + offset
        third = tl.where(third > 0.0, tl.minimum(third, 1.0), 0.0)
    return tl.fma(third, 3.0, MAGIC)


@triton.jit
def _sum4(x0, x1, x2, x3):
    """[ROWS] sums over a row held as quarters."""
    return tl.sum((x0 + x1) + (x2 + x3), 1)


@triton.jit
def _at_least(x, limit):
    """1.0 where x >= limit [ROWS, 1], else 0.0."""
    return tl.where(x >= limit, 1.0, 0.0)


@triton.jit
def _count4(x0, x1, x2, x3, middle):
    """[ROWS] float32 number of elements at or above the float32 whose bits are ``middle`` [ROWS]."""
    limit = middle.to(tl.float32, bitcast=True)[:, None]
    return _sum4(_at_least(x0, limit), _at_least(x1, limit), _at_least(x2, limit), _at_least(x3, limit))


@triton.jit
def _rank_from_top(x0, x1, x2, x3, largest, D: tl.constexpr, rank):
    """[ROWS] the ``rank``-th largest |x| of every row, exact, without a sort; ``largest`` [ROWS] is max |x|.

    Three probes a step narrow the interval [lower, upper), kept as bit patterns, to a quarter. Invariant: ``at_lower >=
    rank`` elements are >= lower and ``at_upper < rank`` are >= upper. The answer is the least element >= lower once
    exactly ``rank`` elements are, or when lower and upper are neighbours (ties); and it is the greatest element < upper
    once ``rank - 1`` are >= upper.
    """
    x0 = tl.abs(x0)
    x1 = tl.abs(x1)
    x2 = tl.abs(x2)
    x3 = tl.abs(x3)
    upper = largest.to(tl.int32, bitcast=True) + 1
    lower = upper * 0
    at_lower = lower.to(tl.float32) + D
    at_upper = lower.to(tl.float32)
    is_open = (at_lower != rank) & (at_upper != rank - 1) & (upper - lower > 1)
    step = 0
    while tl.max(is_open.to(tl.int32), 0) > 0:
        # Quarters of the value interval; every fourth time of the interval of bit patterns, which bounds the steps.
        low = lower.to(tl.float32, bitcast=True)
        width = upper.to(tl.float32, bitcast=True) - low
        by_bits = step % 4 == 3
        quarter = (upper - lower) // 4
        probe1 = tl.where(by_bits, lower + quarter, (low + 0.25 * width).to(tl.int32, bitcast=True))
        probe2 = tl.where(by_bits, lower + 2 * quarter, (low + 0.5 * width).to(tl.int32, bitcast=True))
        probe3 = tl.where(by_bits, upper - quarter, (low + 0.75 * width).to(tl.int32, bitcast=True))
        probe1 = tl.maximum(tl.minimum(probe1, upper - 1), lower + 1)
        probe2 = tl.maximum(tl.minimum(probe2, upper - 1), lower + 1)
        probe3 = tl.maximum(tl.minimum(probe3, upper - 1), lower + 1)
        count1 = _count4(x0, x1, x2, x3, probe1)
        count2 = _count4(x0, x1, x2, x3, probe2)
        count3 = _count4(x0, x1, x2, x3, probe3)
        new_lower = tl.where(count3 >= rank, probe3, tl.where(count2 >= rank, probe2, probe1))
        new_at_lower = tl.where(count3 >= rank, count3, tl.where(count2 >= rank, count2, count1))
        new_upper = tl.where(count1 < rank, probe1, tl.where(count2 < rank, probe2, probe3))
        new_at_upper = tl.where(count1 < rank, count1, tl.where(count2 < rank, count2, count3))
        raises = is_open & (count1 >= rank)
        drops = is_open & (count3 < rank)
        lower = tl.where(raises, new_lower, lower)
        at_lower = tl.where(raises, new_at_lower, at_lower)
        upper = tl.where(drops, new_upper, upper)
        at_upper = tl.where(drops, new_at_upper, at_upper)
        is_open = (at_lower != rank) & (at_upper != rank - 1) & (upper - lower > 1)
        step += 1
    # One threshold serves both: from below it lets the least element >= lower through, else the greatest < upper.
    from_above = (at_upper == rank - 1) & (at_lower != rank)
    edge = tl.where(from_above, upper, lower).to(tl.float32, bitcast=True)[:, None]
    sign = tl.where(from_above, -1.0, 1.0)[:, None]
    x0 = _candidate(x0, edge, sign)
    x1 = _candidate(x1, edge, sign)
    x2 = _candidate(x2, edge, sign)
    x3 = _candidate(x3, edge, sign)
    return tl.abs(tl.min(tl.minimum(tl.minimum(x0, x1), tl.minimum(x2, x3)), 1))


@triton.jit
def _candidate(x, edge, sign):
    """sign * x where x lies on the side of the edge that the sign (1: at or above, -1: below) selects, else inf."""
    return tl.where((x >= edge) == (sign > 0.0), x * sign, float("inf"))


@triton.jit
def _range(x0, x1, x2, x3):
    """[ROWS] least and greatest element of every row."""
    low = tl.minimum(tl.minimum(x0, x1), tl.minimum(x2, x3))
    high = tl.maximum(tl.maximum(x0, x1), tl.maximum(x2, x3))
    return tl.min(low, 1), tl.max(high, 1)


@triton.jit
def _refit(x0, x1, x2, x3, total, scale, minimum, D: tl.constexpr, ASM: tl.constexpr):
    """One round of assigning codes and fitting (scale, minimum) to them by least squares; ``total`` [ROWS] is sum(x).

    The old pair stays where the codes have no variance or the fitted scale is not positive.
    """
    slope = _slope(scale)
    offset = (minimum * -slope + HALF_UP)[:, None]
    c0 = _nearest(x0, slope[:, None], offset, ASM) - MAGIC
    c1 = _nearest(x1, slope[:, None], offset, ASM) - MAGIC
    c2 = _nearest(x2, slope[:, None], offset, ASM) - MAGIC
    c3 = _nearest(x3, slope[:, None], offset, ASM) - MAGIC
    # The sums of codes (at most 3 D) and of their squares (at most 9 D) share one exact float32 and one reduction.
    squares = tl.fma(c3, c3, tl.fma(c2, c2, tl.fma(c1, c1, c0 * c0)))
    both = tl.fma((c0 + c1) + (c2 + c3), 4096.0, squares)
    inner = tl.fma(x3, c3, tl.fma(x2, c2, tl.fma(x1, c1, x0 * c0)))
    both = tl.sum(both, 1)
    inner = tl.sum(inner, 1)
    codes = tl.floor(both * (1.0 / 4096.0))
    variance = (both - codes * 4096.0) * D - codes * codes
    fitted = (inner * D - codes * total) / variance
    better = (variance > 0.0) & (fitted > 0.0)
    minimum = tl.where(better, (total - fitted * codes) * (1.0 / D), minimum)
    return tl.where(better, fitted, scale), minimum


@triton.jit
def _moments(x0, x1, x2, x3, total, span, D: tl.constexpr):
    """Scale and minimum [ROWS] about the mean of rows >= 0 of range ``span``, or the range's where that is wide."""
    mean = total * (1.0 / D)
    squares = tl.sum(tl.fma(x3, x3, tl.fma(x2, x2, tl.fma(x1, x1, x0 * x0))), 1)
    deviation = tl.sqrt(tl.maximum(squares * (1.0 / D) - mean * mean, 0.0))
    close = (span < OUTLYING * deviation) & (deviation < float("inf"))
    step = STEP * deviation
    return tl.where(close, step, span * (1.0 / 3.0)), tl.where(close, mean - 1.5 * step, 0.0)


@triton.jit
def quantize_rows(
    x0, x1, x2, x3, clip, gain, most, D: tl.constexpr, ROUNDS: tl.constexpr, MOMENTS: tl.constexpr, ASM: tl.constexpr
):  # fmt: skip
    """Codes, scale and minimum of rows held as four quarters [ROWS, D/4] float32 (channels 4k, 4k + 1, ...).

    A scale that would end up above ``most`` is cut to it about the middle of its levels, and codes follow.
    Returns MAGIC + codes as quarters, then scale and minimum [ROWS] float32, NaN where a row is not finite.
    """
    low, high = _range(x0, x1, x2, x3)
    if clip < 1.0:
        rank = D - tl.minimum((clip * D).to(tl.int32), D - 1)
        limit = _rank_from_top(x0, x1, x2, x3, tl.maximum(-low, high), D, rank)
        low = tl.maximum(low, -limit)
        high = tl.minimum(high, limit)
        if ROUNDS > 0 or MOMENTS:
            x0 = tl.maximum(tl.minimum(x0, limit[:, None]), -limit[:, None])
            x1 = tl.maximum(tl.minimum(x1, limit[:, None]), -limit[:, None])
            x2 = tl.maximum(tl.minimum(x2, limit[:, None]), -limit[:, None])
            x3 = tl.maximum(tl.minimum(x3, limit[:, None]), -limit[:, None])
    # Distances from the least value: exact where rows are nearly constant, and the fit needs no large offset.
    x0 -= low[:, None]
    x1 -= low[:, None]
    x2 -= low[:, None]
    x3 -= low[:, None]
    total = _sum4(x0, x1, x2, x3)
    if MOMENTS:
        scale, minimum = _moments(x0, x1, x2, x3, total, high - low, D)
    else:
        scale = (high - low) * (1.0 / 3.0)
        minimum = tl.zeros_like(scale)
    for _ in range(ROUNDS):
        scale, minimum = _refit(x0, x1, x2, x3, total, scale, minimum, D, ASM)
    wide = scale * gain > most
    narrowed = most / gain
    minimum = tl.where(wide, minimum + 1.5 * (scale - narrowed), minimum)
    scale = tl.where(wide, narrowed, scale)
    slope = _slope(scale)
    offset = (minimum * -slope + HALF_UP)[:, None]
    c0 = _nearest(x0, slope[:, None], offset, ASM)
    c1 = _nearest(x1, slope[:, None], offset, ASM)
    c2 = _nearest(x2, slope[:, None], offset, ASM)
    c3 = _nearest(x3, slope[:, None], offset, ASM)
    middle = minimum + 1.5 * scale
    scale = scale * gain
    minimum = low + (middle - 1.5 * scale)
    finite = total - total == 0.0
    return c0, c1, c2, c3, tl.where(finite, scale, float("nan")), tl.where(finite, minimum, float("nan"))


@triton.jit
def _slope(scale):
    """A third of a code per unit; finite for the smallest scale and zero for none."""
    return tl.where(scale > 0.0, tl.minimum(1.0 / (3.0 * scale), 3.0e38), 0.0)


@triton.jit
def pack_quarters(c0, c1, c2, c3, ROWS: tl.constexpr, D: tl.constexpr):
    """MAGIC + codes as quarters -> [ROWS, D/16] int32, sixteen codes a word, channel order from the low bits.

    MAGIC's own bits add up to a constant, modulo 2^32, that is taken off once.
    """
    i0 = c0.to(tl.int32, bitcast=True)
    i1 = c1.to(tl.int32, bitcast=True)
    i2 = c2.to(tl.int32, bitcast=True)
    i3 = c3.to(tl.int32, bitcast=True)
    fields = tl.reshape(i0 + (i1 << 2) + (i2 << 4) + (i3 << 6), (ROWS, D // 16, 4))
    place = 8 * tl.arange(0, 4)
    return tl.sum(fields << place[None, None, :], 2) - MAGIC_WORD


@triton.jit
def half_bits(x):
    """float32 -> bits of the clamped fp16 (NaN stays NaN) as int32."""
    clamped = tl.where(x == x, tl.minimum(tl.maximum(x, -HALF_MAX), HALF_MAX), x)
    return clamped.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
