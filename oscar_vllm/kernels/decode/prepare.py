# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""The launch before the splits: transform the queries into operand form and, in a decode step, write the new tokens.

What every program of the decode kernel would otherwise repeat is done once here: per query column the int8 halves of
its 16-bit integer form, its 16-bit halves for the window, and its factors. Both roles fetch their matrices before they
wait for the kernel before them, and share one launch because each alone is shorter than launching it.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS, PageLayout
from oscar_vllm.kernels.decode.device import dependent_launch, use_dependent_launch
from oscar_vllm.kernels.decode.partials import SplitPlan
from oscar_vllm.kernels.launch import Launch, cdiv
from oscar_vllm.kernels.operands import query_operands, write_operands
from oscar_vllm.kernels.rows_triton import INLINE_PTX, dot16
from oscar_vllm.kernels.views import CacheView, LayerRecipe
from oscar_vllm.kernels.write.triton import write_tiles

_WRITE_ROWS = 16
_WARPS = 8


class Operands(NamedTuple):
    """Queries as the decode kernel reads them; a lane is a column block of one (request, head)."""

    codes: torch.Tensor
    """[lanes, 4, 2 * N, D / 4] int8: of channel 4k + field, the high (even) and low (odd) byte of each column."""
    halves: torch.Tensor
    """[lanes, 2, N, D] window dtype: column over its largest channel, as a sum of two."""
    factors: torch.Tensor
    """[lanes, 3, N] float32: channel sum in integer units, integer score to log2, window score to log2."""


class NewTokens(NamedTuple):
    """What a decode step writes before it attends; see :func:`write_triton`."""

    key: torch.Tensor
    value: torch.Tensor
    slots: torch.Tensor
    window_slots: torch.Tensor
    recipe: LayerRecipe


@triton.jit
def _store_bytes(place, x, inside, D: tl.constexpr, N: tl.constexpr, M: tl.constexpr):
    """Store [M, D] integers as bytes [M, field, D / 4]: whole words, for lone bytes would each cost a memory sector."""
    x = tl.reshape(x, (M, D // 16, 4, 4))  # channel 16 * word + 4 * byte + field
    x = (x & 255) << (8 * tl.arange(0, 4))[None, None, :, None]
    word = tl.arange(0, D // 16)[None, :, None]
    field = tl.arange(0, 4)[None, None, :]
    place = place[:, None, None] + field * (N * D // 8) + word
    tl.store(place, tl.sum(x, 2), mask=inside[:, None, None])


@triton.jit
def _query_rows(
    query, matrix, inverse, codes, halves, factors, seq_lens, query_start, requests, scale,
    query_stride_token, query_stride_head, block, head, heads, group, columns, column_blocks,
    D: tl.constexpr, N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, TRANSFORM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """M rows (request, query column) of one KV head."""
    d = tl.arange(0, D)
    k = tl.arange(0, K)
    if TRANSFORM:
        matrix += head.to(tl.int64) * (2 * D * D)
        factor = tl.load(inverse + head)
        if K == D:
            at = matrix + d[:, None] * D + d[None, :]
            high_part = tl.load(at)
            low_part = tl.load(at + D * D)
    if PDL:
        gdc_wait()
        gdc_launch_dependents()  # the decode kernel's programs start now and wait for this grid before they read it
    row = block * M + tl.arange(0, M)
    request = row // (columns * column_blocks)
    column = row % (columns * column_blocks)
    inside = request < requests
    token = column // group
    first_token = tl.load(query_start + request, mask=inside, other=0)
    new = tl.load(query_start + request + 1, mask=inside, other=0) - first_token
    length = tl.load(seq_lens + request, mask=inside, other=0)
    live = inside & (token < new) & (length > 0)
    at_row = (first_token + token).to(tl.int64) * query_stride_token
    at_row = query + at_row + (head * group + column % group).to(tl.int64) * query_stride_head
    if TRANSFORM:
        q = tl.zeros([M, D], tl.float32)
        if K == D:
            x = tl.load(at_row[:, None] + d[None, :], mask=live[:, None], other=0.0)
            q = dot16(x, low_part, q)
            q = dot16(x, high_part, q)
        else:
            for start in tl.range(0, D, K, num_stages=1):
                x_part = tl.load(at_row[:, None] + (start + k)[None, :], mask=live[:, None], other=0.0)
                at_part = matrix + (start + k)[:, None] * D + d[None, :]
                q = dot16(x_part, tl.load(at_part + D * D), q)
                q = dot16(x_part, tl.load(at_part), q)
        q = q * factor
    else:
        q = tl.load(at_row[:, None] + d[None, :], mask=live[:, None], other=0.0).to(tl.float32)
    largest = tl.maximum(tl.max(tl.abs(q), 1), 1e-20)
    unit = 32512.0 / largest
    lane = (request * heads + head) * column_blocks + column // columns
    lane = lane.to(tl.int64)
    c = column % columns

    to_log2 = scale * 1.4426950408889634
    at_factor = factors + lane * (3 * N) + c
    tl.store(at_factor, tl.sum(q, 1) * unit, mask=inside)
    tl.store(at_factor + N, to_log2 / unit, mask=inside)
    tl.store(at_factor + 2 * N, to_log2 * largest, mask=inside)

    # Odd fields' codes come out times 4 (see unpack.py).
    quarter = tl.where(d % 2 == 0, 1.0, 0.25)
    i = tl.floor(q * unit[:, None] * quarter[None, :] + 0.5).to(tl.int32)
    high = (i + 128) >> 8
    low = i - (high << 8)
    place = codes.to(tl.pointer_type(tl.int32)) + lane * (D * N // 2) + c * (D // 8)
    _store_bytes(place, high, inside, D, N, M)
    _store_bytes(place + D // 16, low, inside, D, N, M)

    x = q / largest[:, None]
    first = x.to(halves.dtype.element_ty)
    second = (x - first.to(tl.float32)).to(halves.dtype.element_ty)
    to_half = halves + (lane * (2 * N * D) + c * D)[:, None] + d[None, :]
    tl.store(to_half, first, mask=inside[:, None])
    tl.store(to_half + N * D, second, mask=inside[:, None])


@triton.jit(do_not_specialize=["requests", "tokens", "query_programs", "heads", "group", "columns", "column_blocks"])
def _prepare_kernel(
    query, matrix, inverse, codes, halves, factors, seq_lens, query_start, requests, scale,
    query_stride_token, query_stride_head, query_programs, heads, group, columns, column_blocks,
    key, value, write_matrix, shift, numbers, history, window, slots, window_slots, tokens,
    key_token, key_head, value_token, value_head,
    history_block, history_head, window_block, window_head, window_row,
    D: tl.constexpr, N: tl.constexpr, M: tl.constexpr, K: tl.constexpr, TRANSFORM: tl.constexpr,
    WRITE: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CODES: tl.constexpr, META: tl.constexpr,
    ROUNDS: tl.constexpr, MOMENTS: tl.constexpr, ROWS: tl.constexpr, ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Programs below ``query_programs`` take M query rows of a head, those above one tile of new tokens each."""
    program = tl.program_id(0)
    if program < query_programs:
        _query_rows(
            query, matrix, inverse, codes, halves, factors, seq_lens, query_start, requests, scale,
            query_stride_token, query_stride_head, program // heads, program % heads,
            heads, group, columns, column_blocks, D, N, M, K, TRANSFORM, PDL,
        )  # fmt: skip
    elif WRITE:
        program -= query_programs
        write_tiles(
            key, value, write_matrix, shift, numbers, history, window, slots, window_slots, tokens,
            key_token, key_head, value_token, value_head,
            history_block, history_head, window_block, window_head, window_row,
            program % (2 * heads), program // (2 * heads), tl.cdiv(tokens, ROWS),
            D, PAGE, WINDOW, CODES, META, ROUNDS, MOMENTS, ROWS, ASM, K, PDL,
        )  # fmt: skip


_prepare = Launch(_prepare_kernel)


def prepare(
    query: torch.Tensor,
    view: CacheView,
    scale: float,
    plan: SplitPlan,
    transform: torch.Tensor | None,
    new: NewTokens | None = None,
) -> Operands:
    """Operand form of the queries of a batch; with ``new`` also writes its new tokens into both caches.

    Args:
        query: [T, Hq, D], last dimension contiguous; BF16 or FP16 with a transform.
        view: the caches and tables.
        scale: softmax scale.
        plan: the host's share of the split plan.
        transform: [H, D, D] float32 applied to the queries, or None where they are transformed already.
        new: the step's new tokens, or None where they are written already.
    """
    heads = view.history.shape[1]
    requests = view.seq_lens.shape[0]
    dim = query.shape[2]
    n = plan.columns_pad
    lanes = requests * heads * plan.column_blocks
    device = query.device
    codes = torch.empty(lanes, 4, 2 * n, dim // 4, dtype=torch.int8, device=device)
    halves = torch.empty(lanes, 2, n, dim, dtype=view.window.dtype, device=device)
    factors = torch.empty(lanes, 3, n, dtype=torch.float32, device=device)
    query_programs = cdiv(requests * plan.columns * plan.column_blocks, 16) * heads
    matrix, inverse = (None, None) if transform is None else query_operands(transform, query.dtype)
    tokens = 0 if new is None else new.key.shape[0]
    written: tuple[torch.Tensor | None, ...] = (None,) * 9
    token_strides = (0,) * 4
    if new is not None:
        operands = write_operands(new.recipe, new.key.dtype)
        written = (new.key, new.value, *operands, view.history, view.window, new.slots, new.window_slots)
        token_strides = (new.key.stride(0), new.key.stride(1), new.value.stride(0), new.value.stride(1))
    layout = PageLayout(dim)
    _prepare(
        (query_programs + cdiv(tokens, _WRITE_ROWS) * 2 * heads, 1, 1),
        query, matrix, inverse, codes, halves, factors, view.seq_lens, view.query_start, requests, scale,
        query.stride(0), query.stride(1), query_programs, heads, plan.group, plan.columns, plan.column_blocks,
        *written, tokens, *token_strides,
        view.history.stride(0), view.history.stride(1),
        view.window.stride(0), view.window.stride(1), view.window.stride(2),
        dim, n, 16, dim if dim <= 128 else 64, transform is not None,
        new is not None, PAGE_TOKENS, WINDOW_TOKENS, layout.value_codes, layout.key_meta,
        0 if new is None else new.recipe.rounds, new is not None and new.recipe.moments, _WRITE_ROWS, INLINE_PTX,
        use_dependent_launch(device), num_warps=_WARPS, num_stages=1, **dependent_launch(device),
    )  # fmt: skip
    return Operands(codes, halves, factors)
