"""Write new tokens into both caches in one launch: center, transform, quantize, pack, store.

Every program owns one KV head of K or of V, keeps that head's matrix on chip and walks over tiles of tokens. The page
is never read: a token touches only its own bytes.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS, PageLayout
from oscar_vllm.kernels.rows_triton import (
    INTERPRETED,
    matrix_scale,
    multiply_halves,
    power_of_two,
    processor_count,
    shuffled_channels,
    split_half,
    unshuffle,
)
from oscar_vllm.kernels.transform.triton import check_queries, transform_rows
from oscar_vllm.kernels.views import LayerRecipe
from oscar_vllm.kernels.write.quantize_triton import half_bits, quantize_rows

MAGIC_WORD = tl.constexpr(0x3C400000)  # what the bits of sixteen MAGICs add to a word of codes, modulo 2^32


@triton.jit
def _write_rows(
    key, value, key_matrix, value_matrix, key_mean, value_mean, key_clip, value_clip, key_gain, value_gain,
    history, window, slots, window_slots, tokens,
    key_token, key_head, value_token, value_head,
    history_block, history_head, window_block, window_head, window_row, head, is_value, first, step,
    D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CODES: tl.constexpr,
    META: tl.constexpr, ROUNDS: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Tiles ``first, first + step, ...`` of the tokens for K (is_value 0) or V (1) of one head."""
    rows = key + head * key_head
    token_stride = key_token
    matrix = key_matrix
    mean_at = key_mean
    clip_at = key_clip
    gain_at = key_gain
    if is_value == 1:
        rows = value + head * value_head
        token_stride = value_token
        matrix = value_matrix
        mean_at = value_mean
        clip_at = value_clip
        gain_at = value_gain
    channel = tl.arange(0, D)
    mean = tl.load(mean_at + head * D + channel)
    clip = tl.load(clip_at + head)
    gain = tl.load(gain_at + head)
    matrix += head * D * D
    FITS: tl.constexpr = D <= 128
    shuffled = shuffled_channels(D)
    if FITS:
        whole = tl.load(matrix + channel[:, None] * D + shuffled[None, :])
        factor, inverse_matrix = power_of_two(tl.max(tl.max(tl.abs(whole), 1), 0))
        matrix_high, matrix_low = split_half(whole * factor)
    else:
        factor, inverse_matrix = matrix_scale(matrix, D, 1, D, 64)

    for tile in tl.range(first, tl.cdiv(tokens, ROWS), step, num_stages=1):
        token = tile * ROWS + tl.arange(0, ROWS)
        live = token < tokens
        slot = tl.load(slots + token, mask=live, other=-1)
        window_slot = tl.load(window_slots + token, mask=live, other=-1)
        at = rows + token.to(tl.int64)[:, None] * token_stride
        x = tl.load(at + channel[None, :], mask=live[:, None], other=0.0).to(tl.float32) - mean[None, :]
        scale_up, scale_down = power_of_two(tl.max(tl.abs(x), 1))
        product = tl.zeros([ROWS, D], tl.float32)
        if FITS:
            high, low = split_half(x * scale_up[:, None])
            product = multiply_halves(high, low, matrix_high, matrix_low, product)
        else:
            for start in range(0, D, 64):
                part = start + tl.arange(0, 64)
                columns = tl.load(at + part[None, :], mask=live[:, None], other=0.0).to(tl.float32)
                columns -= tl.load(mean_at + head * D + part)[None, :]
                columns_high, columns_low = split_half(columns * scale_up[:, None])
                block = tl.load(matrix + part[:, None] * D + shuffled[None, :])
                block_high, block_low = split_half(block * factor)
                product = multiply_halves(columns_high, columns_low, block_high, block_low, product)
        product = unshuffle(product, ROWS, D)
        scale_down *= inverse_matrix

        stored = slot >= PAGE
        real = stored & (window_slot >= WINDOW)
        if tl.max(real.to(tl.int32), 0) > 0:
            row = window + (window_slot // WINDOW) * window_block + head * window_head
            row += (window_slot % WINDOW) * window_row + is_value * D
            exact = (product * scale_down[:, None]).to(window.dtype.element_ty)
            tl.store(row[:, None] + channel[None, :], exact, mask=real[:, None])

        code, scale, minimum = quantize_rows(product, clip, gain, D, ROUNDS, ASM)
        # Sixteen codes a word. MAGIC's own bits add up to a constant, modulo 2^32, that is taken off once.
        bits = tl.reshape(code.to(tl.int32, bitcast=True), (ROWS, D // 16, 16))
        shift = 2 * tl.arange(0, 16)
        words = tl.sum(bits << shift[None, None, :], 2) - MAGIC_WORD
        page = history + (slot // PAGE) * history_block + head * history_head
        inside = (slot % PAGE).to(tl.int32)
        codes_at = (page + is_value * CODES + inside * (D // 4)).to(tl.pointer_type(tl.int32))
        tl.store(codes_at[:, None] + tl.arange(0, D // 16)[None, :], words, mask=stored[:, None])
        meta = half_bits(scale * scale_down) | (half_bits(minimum * scale_down) << 16)
        meta_at = (page + META + is_value * (4 * PAGE) + inside * 4).to(tl.pointer_type(tl.int32))
        tl.store(meta_at, meta, mask=stored)


@triton.jit
def _write_kernel(
    key, value, key_matrix, value_matrix, key_mean, value_mean, key_clip, value_clip, key_gain, value_gain,
    history, window, slots, window_slots, tokens,
    key_token, key_head, value_token, value_head,
    history_block, history_head, window_block, window_head, window_row,
    query, query_matrix, out, query_token, query_head, out_token, out_head,
    H: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CODES: tl.constexpr,
    META: tl.constexpr, ROUNDS: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr,
    G: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program axis 0: K and V of every head in turn, then (G > 0) the queries of every KV head."""
    pair = tl.program_id(0)
    if pair < 2 * H:
        _write_rows(
            key, value, key_matrix, value_matrix, key_mean, value_mean, key_clip, value_clip, key_gain, value_gain,
            history, window, slots, window_slots, tokens,
            key_token, key_head, value_token, value_head,
            history_block, history_head, window_block, window_head, window_row,
            pair // 2, pair % 2, tl.program_id(1), tl.num_programs(1),
            D, PAGE, WINDOW, CODES, META, ROUNDS, ROWS, ASM,
        )  # fmt: skip
    elif G > 0:
        transform_rows(
            query, query_matrix, out, tokens, query_token, query_head, out_token, out_head,
            pair - 2 * H, tl.program_id(1), tl.num_programs(1), G, D, ROWS, BLOCK,
        )  # fmt: skip


def _tile(rows: int, heads: int, processors: int) -> tuple[int, int]:
    """(rows of a tile, programs a head) for so many rows of each of so many heads."""
    if rows * heads <= 16 * 4 * processors:
        return 16, triton.cdiv(rows, 16)
    return 64, min(triton.cdiv(rows, 64), max(1, 2 * processors // heads))


def _launch(
    key: torch.Tensor,
    value: torch.Tensor,
    history: torch.Tensor,
    window: torch.Tensor,
    slots: torch.Tensor,
    window_slots: torch.Tensor,
    recipe: LayerRecipe,
    query: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> None:
    tokens, heads, dim = key.shape
    if tokens == 0:
        return
    if key.stride(2) != 1 or value.stride(2) != 1 or window.stride(3) != 1:
        raise ValueError("key, value and window need a contiguous last dimension")
    layout = PageLayout(dim)
    if history.stride(3) != 1 or history.stride(2) != layout.page_bytes // PAGE_TOKENS:
        raise ValueError("a page of the history needs its bytes contiguous")
    rows, programs = _tile(tokens, 2 * heads, processor_count(key.device))
    queries: tuple[Any, ...] = (key, recipe.query, key, 0, 0, 0, 0)
    group = 0
    if query is not None and out is not None:
        group = check_queries(query, recipe.query, out)
        queries = (query, recipe.query.contiguous(), out, *query.stride()[:2], *out.stride()[:2])
        programs = max(programs, min(triton.cdiv(tokens * group, rows), 4 * programs))
    _write_kernel[((3 if group else 2) * heads, programs)](
        key, value, recipe.key.contiguous(), recipe.value.contiguous(),
        recipe.key_mean.contiguous(), recipe.value_mean.contiguous(),
        recipe.key_clip.contiguous(), recipe.value_clip.contiguous(),
        recipe.key_gain.contiguous(), recipe.value_gain.contiguous(),
        history, window, slots, window_slots, tokens,
        key.stride(0), key.stride(1), value.stride(0), value.stride(1),
        history.stride(0), history.stride(1), window.stride(0), window.stride(1), window.stride(2), *queries,
        H=heads, D=dim, PAGE=PAGE_TOKENS, WINDOW=WINDOW_TOKENS, CODES=layout.value_codes, META=layout.key_meta,
        ROUNDS=recipe.rounds, ROWS=rows, ASM=not INTERPRETED, G=group, BLOCK=dim if dim <= 128 else 64,
        num_warps=4 if dim <= 128 else 8, enable_fp_fusion=True,
    )  # fmt: skip


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
    _launch(key, value, history, window, slots, window_slots, recipe)


def write_and_transform_triton(
    key: torch.Tensor,
    value: torch.Tensor,
    history: torch.Tensor,
    window: torch.Tensor,
    slots: torch.Tensor,
    window_slots: torch.Tensor,
    recipe: LayerRecipe,
    query: torch.Tensor,
    out: torch.Tensor,
) -> None:
    """:func:`write_triton` and the query transform of the same T tokens in one launch, for decodes.

    Args:
        key, value, history, window, slots, window_slots, recipe: as :func:`write_triton` takes them.
        query: [T, Hq, D] BF16 or FP16 post-RoPE queries, any strides with a contiguous last dim.
        out: [T, Hq, D] of any floating type: ``query[t, h] @ recipe.query[h // G]``.
    """
    _launch(key, value, history, window, slots, window_slots, recipe, query, out)
