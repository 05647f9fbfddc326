# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Write new tokens into both caches in one launch: center, transform, quantize, pack, store.

Every program owns one KV head of K or of V, keeps that head's matrix on chip and walks over tiles of tokens. The page
is never read: a token touches only its own bytes.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS, PageLayout
from oscar_vllm.kernels.launch import Launch, cdiv
from oscar_vllm.kernels.operands import write_operands
from oscar_vllm.kernels.rows_triton import INLINE_PTX, dot16, processor_count, unshuffle
from oscar_vllm.kernels.views import LayerRecipe
from oscar_vllm.kernels.write.quantize_triton import half_bits, pack_quarters, quantize_rows


@triton.jit
def write_tiles(
    key, value, matrix, shift, numbers, history, window, slots, window_slots, tokens,
    key_token, key_head, value_token, value_head,
    history_block, history_head, window_block, window_head, window_row, pair, first, step,
    D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CODES: tl.constexpr,
    META: tl.constexpr, ROUNDS: tl.constexpr, MOMENTS: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """K (pair = 2 * head) or V (2 * head + 1) of the tiles of ROWS tokens first, first + step, and so on."""
    head = (pair // 2).to(tl.int64)
    is_value = pair % 2
    rows = key + head * key_head
    token_stride = key_token
    if is_value == 1:
        rows = value + head * value_head
        token_stride = value_token
    channel = tl.arange(0, D)
    part = tl.arange(0, BLOCK)
    inverse = tl.load(numbers + pair * 4)
    clip = tl.load(numbers + pair * 4 + 1)
    gain = tl.load(numbers + pair * 4 + 2)
    most = tl.load(numbers + pair * 4 + 3)
    matrix += pair * (2 * D * D)
    shift_parts = tl.load(shift + (pair * 16 + tl.arange(0, 16))[:, None] * D + channel[None, :])
    ones = tl.full([ROWS, 16], 1.0, tl.bfloat16)
    if BLOCK == D:  # the matrix stays on chip
        whole = matrix + channel[:, None] * D + channel[None, :]
        high = tl.load(whole)
        low = tl.load(whole + D * D)

    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    if BLOCK == D:  # rows are fetched a tile ahead
        ahead = first * ROWS + tl.arange(0, ROWS)
        at = rows + ahead.to(tl.int64)[:, None] * token_stride
        x = tl.load(at + channel[None, :], mask=(ahead < tokens)[:, None], other=0.0)
    for tile in range(first, tl.cdiv(tokens, ROWS), step):
        token = tile * ROWS + tl.arange(0, ROWS)
        live = token < tokens
        slot = tl.load(slots + token, mask=live, other=-1)
        window_slot = tl.load(window_slots + token, mask=live, other=-1)
        product = dot16(ones, shift_parts, tl.zeros([ROWS, D], tl.float32))
        if BLOCK == D:
            product = dot16(x, low, product)
            product = dot16(x, high, product)
            ahead = token + step * ROWS
            at = rows + ahead.to(tl.int64)[:, None] * token_stride
            x = tl.load(at + channel[None, :], mask=(ahead < tokens)[:, None], other=0.0)
        else:
            at = rows + token.to(tl.int64)[:, None] * token_stride
            for start in tl.range(0, D, BLOCK, num_stages=1):
                x_part = tl.load(at + (start + part)[None, :], mask=live[:, None], other=0.0)
                whole = matrix + (start + part)[:, None] * D + channel[None, :]
                product = dot16(x_part, tl.load(whole + D * D), product)
                product = dot16(x_part, tl.load(whole), product)
        product = unshuffle(product, ROWS, D)

        stored = slot >= PAGE
        real = stored & (window_slot >= WINDOW)
        row = window + (window_slot // WINDOW) * window_block + head * window_head
        row += (window_slot % WINDOW) * window_row + is_value * D
        if tl.max(real.to(tl.int32), 0) > 0:
            exact = (product * inverse).to(window.dtype.element_ty)
            tl.store(row[:, None] + channel[None, :], exact, mask=real[:, None])

        even, odd = tl.split(tl.reshape(product, (ROWS, D // 4, 2, 2)))
        x0, x2 = tl.split(even)
        x1, x3 = tl.split(odd)
        c0, c1, c2, c3, scale, minimum = quantize_rows(x0, x1, x2, x3, clip, gain, most, D, ROUNDS, MOMENTS, ASM)
        words = pack_quarters(c0, c1, c2, c3, ROWS, D)
        page = history + (slot // PAGE) * history_block + head * history_head
        inside = (slot % PAGE).to(tl.int32)
        codes_at = (page + is_value * CODES + inside * (D // 4)).to(tl.pointer_type(tl.int32))
        tl.store(codes_at[:, None] + tl.arange(0, D // 16)[None, :], words, mask=stored[:, None])
        meta = half_bits(scale * inverse) | (half_bits(minimum * inverse) << 16)
        meta_at = (page + META + is_value * (4 * PAGE) + inside * 4).to(tl.pointer_type(tl.int32))
        tl.store(meta_at, meta, mask=stored)


@triton.jit(do_not_specialize=["tokens"])
def _write_kernel(
    key, value, matrix, shift, numbers, history, window, slots, window_slots, tokens,
    key_token, key_head, value_token, value_head,
    history_block, history_head, window_block, window_head, window_row,
    D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CODES: tl.constexpr,
    META: tl.constexpr, ROUNDS: tl.constexpr, MOMENTS: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """Program axis 0 is K and V of every head in turn; axis 1 shares the tiles of ROWS tokens."""
    write_tiles(
        key, value, matrix, shift, numbers, history, window, slots, window_slots, tokens,
        key_token, key_head, value_token, value_head,
        history_block, history_head, window_block, window_head, window_row,
        tl.program_id(0), tl.program_id(1), tl.num_programs(1),
        D, PAGE, WINDOW, CODES, META, ROUNDS, MOMENTS, ROWS, ASM, BLOCK, False,
    )  # fmt: skip


_write = Launch(_write_kernel)


def _tile(rows: int, heads: int, dim: int, processors: int) -> tuple[int, int, int]:
    """(rows of a tile, programs a head, warps) for so many rows of each of so many heads."""
    if rows * heads <= 16 * 4 * processors:
        return 16, cdiv(rows, 16), 8
    # Two programs of 64 rows fit a multiprocessor beside their matrices.
    return 64, min(cdiv(rows, 64), max(1, 2 * processors // heads)), 4 if dim <= 128 else 8


def write_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    history: torch.Tensor,
    window: torch.Tensor,
    slots: torch.Tensor,
    window_slots: torch.Tensor,
    recipe: LayerRecipe,
) -> None:
    """Write T new tokens of H KV heads into both caches, K and V in one launch.

    Args:
        key: [T, H, D] raw post-RoPE keys, BF16 or FP16; any strides with a contiguous last dim.
        value: [T, H, D] raw values, the same.
        history: [blocks, H, PAGE_TOKENS, D/2 + 8] uint8; each [block, head] page contiguous and 4-byte aligned.
        window: [blocks, H, WINDOW_TOKENS, 2 * D] of the model's dtype, last dim contiguous.
        slots: [T] int64 history slots (block * PAGE_TOKENS + row); padding (-1) and block 0 are skipped.
        window_slots: [T] int64 window slots (block * WINDOW_TOKENS + row); padding and block 0 are skipped.
        recipe: the layer's transforms.
    """
    tokens, heads, dim = key.shape
    if tokens == 0:
        return
    if key.stride(2) != 1 or value.stride(2) != 1 or window.stride(3) != 1:
        raise ValueError("key, value and window need a contiguous last dimension")
    layout = PageLayout(dim)
    if history.stride(3) != 1 or history.stride(2) != layout.token_bytes:
        raise ValueError("a page of the history needs its bytes contiguous")
    rows, programs, warps = _tile(tokens, 2 * heads, dim, processor_count(key.device))
    _write(
        (2 * heads, programs, 1),
        key, value, *write_operands(recipe, key.dtype), history, window, slots, window_slots, tokens,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        history.stride(0), history.stride(1), window.stride(0), window.stride(1), window.stride(2),
        dim, PAGE_TOKENS, WINDOW_TOKENS, layout.value_codes, layout.key_meta,
        recipe.rounds, recipe.moments, rows, INLINE_PTX, dim if dim <= 128 else 64,
        num_warps=warps, num_stages=1,
    )  # fmt: skip
