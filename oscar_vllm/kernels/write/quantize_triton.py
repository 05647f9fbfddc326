"""The two-bit quantizer on rows held in registers: range, clip threshold, least-squares refit, gain.

A code is found with one saturating multiply-add and one that rounds: ``MAGIC + 3 * clamp(t, 0, 1)`` has the code in the
low bits of a float32, so nothing is converted.
"""

import triton
import triton.language as tl

MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: adding it rounds a small float32 to an integer in the low bits
MAGIC_WORD = tl.constexpr(0x3C400000)  # what the bits of sixteen MAGICs add to a word of codes, modulo 2^32
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
def _rank_from_top(x, rank):
    """[ROWS] the ``rank``-th largest |x| of every row of [ROWS, D], exact, by bisection on values.

    Invariant: at least ``rank`` elements are >= lower, fewer are >= upper. The least element >= lower is the answer as
    soon as exactly ``rank`` elements are >= lower, or when lower and upper are neighbours (ties).
    """
    size = tl.abs(x)
    upper = tl.max(size, 1).to(tl.int32, bitcast=True) + 1
    lower = upper * 0
    count = lower + x.shape[1]
    open_rows = (count != rank) & (upper - lower > 1)
    step = 0
    while tl.max(open_rows.to(tl.int32), 0) > 0:
        # Halve the value interval; every fourth time halve the interval of bit patterns, which bounds the steps.
        middle = (lower.to(tl.float32, bitcast=True) * 0.5 + upper.to(tl.float32, bitcast=True) * 0.5).to(
            tl.int32, bitcast=True
        )
        middle = tl.where(step % 4 == 3, lower + (upper - lower) // 2, middle)
        middle = tl.maximum(tl.minimum(middle, upper - 1), lower + 1)
        above = tl.sum(tl.where(size >= middle.to(tl.float32, bitcast=True)[:, None], 1.0, 0.0), 1).to(tl.int32)
        enough = above >= rank
        count = tl.where(open_rows & enough, above, count)
        lower = tl.where(open_rows & enough, middle, lower)
        upper = tl.where(open_rows & (above < rank), middle, upper)
        open_rows = (count != rank) & (upper - lower > 1)
        step += 1
    return tl.min(tl.where(size >= lower.to(tl.float32, bitcast=True)[:, None], size, float("inf")), 1)


@triton.jit
def quantize_rows(x, clip, gain, D: tl.constexpr, ROUNDS: tl.constexpr, ASM: tl.constexpr):
    """[ROWS, D] float32 -> (MAGIC + codes [ROWS, D], scale [ROWS], minimum [ROWS]); NaN where a row is not finite."""
    low = tl.min(x, 1)
    high = tl.max(x, 1)
    if clip < 1.0:
        limit = _rank_from_top(x, D - tl.minimum((clip * D).to(tl.int32), D - 1))
        low = tl.maximum(low, -limit)
        high = tl.minimum(high, limit)
        if ROUNDS > 0:
            x = tl.maximum(tl.minimum(x, limit[:, None]), -limit[:, None])
    # Distances from the least value: exact where rows are nearly constant, and the fit needs no large offset.
    x = x - low[:, None]
    total = tl.sum(x, 1)
    scale = (high - low) * (1.0 / 3.0)
    minimum = tl.zeros_like(scale)
    for _ in tl.static_range(ROUNDS):
        slope = tl.where(scale > 0.0, 1.0 / (3.0 * scale), 0.0)
        code = _nearest(x, slope[:, None], (minimum * -slope + HALF_UP)[:, None], ASM) - MAGIC
        codes = tl.sum(code, 1)
        variance = tl.sum(code * code, 1) * D - codes * codes
        fitted = (tl.sum(x * code, 1) * D - codes * total) / variance
        better = (variance > 0.0) & (fitted > 0.0)
        scale = tl.where(better, fitted, scale)
        minimum = tl.where(better, (total - fitted * codes) * (1.0 / D), minimum)
    slope = tl.where(scale > 0.0, 1.0 / (3.0 * scale), 0.0)
    code = _nearest(x, slope[:, None], (minimum * -slope + HALF_UP)[:, None], ASM)
    middle = minimum + 1.5 * scale
    scale = scale * gain
    minimum = low + (middle - 1.5 * scale)
    finite = total - total == 0.0
    return code, tl.where(finite, scale, float("nan")), tl.where(finite, minimum, float("nan"))


@triton.jit
def half_bits(x):
    """float32 -> bits of the clamped fp16 (NaN stays NaN) as int32."""
    clamped = tl.where(x == x, tl.minimum(tl.maximum(x, -HALF_MAX), HALF_MAX), x)
    return clamped.to(tl.float16).to(tl.int16, bitcast=True).to(tl.int32) & 0xFFFF
