# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Device code that turns packed 2-bit codes into tensor-core operands without an integer-to-float conversion.

Keys go to the int8 tensor cores: a masked byte is already an int8 operand. Values go to the fp16 tensor cores: a masked
16-bit word *is* an exact fp16 subnormal, ``code * 4**position * 2**-24``, and the factor is applied once at the end.
``ASM`` selects one PTX instruction for four bytes (or two words); without it the same bits come from portable Triton.
"""

import triton
import triton.language as tl


@triton.jit
def key_field(codes, FIELD: tl.constexpr, ASM: tl.constexpr):
    """uint8 codes -> int8 codes of field ``FIELD`` (0..3); those of the odd fields come out times 4."""
    MASK: tl.constexpr = 3 << (2 * (FIELD % 2))
    SHIFT: tl.constexpr = 4 * (FIELD // 2)
    if ASM:
        WIDE: tl.constexpr = MASK * 0x01010101
        if SHIFT == 0:
            return tl.inline_asm_elementwise(
                f"and.b32 $0, $1, {WIDE};", "=r,r", [codes], dtype=tl.int8, is_pure=True, pack=4
            )
        else:  # noqa: RET505 (device code: the branch is chosen when it is compiled)
            return tl.inline_asm_elementwise(
                f"{{.reg .b32 t; shr.u32 t, $1, {SHIFT}; and.b32 $0, t, {WIDE};}}",
                "=r,r",
                [codes],
                dtype=tl.int8,
                is_pure=True,
                pack=4,
            )
    else:
        return ((codes >> SHIFT) & MASK).to(tl.int8)


@triton.jit
def value_field(words, FIELD: tl.constexpr, ASM: tl.constexpr):
    """uint16 words of eight codes -> fp16 ``code * 4**(FIELD % 5) * 2**-24`` of field ``FIELD`` (0..7)."""
    MASK: tl.constexpr = 3 << (2 * (FIELD % 5))
    SHIFT: tl.constexpr = 10 * (FIELD // 5)
    if ASM:
        WIDE: tl.constexpr = MASK * 0x00010001
        if SHIFT == 0:
            return tl.inline_asm_elementwise(
                f"and.b32 $0, $1, {WIDE};", "=r,r", [words], dtype=tl.float16, is_pure=True, pack=2
            )
        else:  # noqa: RET505 (device code: the branch is chosen when it is compiled)
            return tl.inline_asm_elementwise(
                f"{{.reg .b32 t; shr.u32 t, $1, {SHIFT}; and.b32 $0, t, {WIDE};}}",
                "=r,r",
                [words],
                dtype=tl.float16,
                is_pure=True,
                pack=2,
            )
    else:
        return ((words >> SHIFT) & MASK).to(tl.float16, bitcast=True)


@triton.jit
def meta_scale(meta):
    """uint32 (fp16 scale, fp16 minimum) -> float32 scale."""
    return (meta & 0xFFFF).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def meta_minimum(meta):
    """uint32 (fp16 scale, fp16 minimum) -> float32 minimum."""
    return (meta >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)
