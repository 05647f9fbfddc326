# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Context rows for FlashAttention: BF16 window tokens copied, INT2 history dequantized, in the varlen form."""

import torch
import triton
import triton.language as tl

from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS, PageLayout
from oscar_vllm.kernels.launch import Launch, cdiv
from oscar_vllm.kernels.views import CacheView

TILE_ELEMENTS = 2048  # small programs: tables and rows are chains of loads, so many must be in flight


@triton.jit
def _half(bits):
    return bits.to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit(do_not_specialize=["table_row", "window_table_row"])
def _gather_kernel(
    history, window, block_table, window_table, seq_lens, query_start, starts, cu_lens, rows, out_key, out_value,
    history_block, history_head, window_block, window_head, window_row, table_row, window_table_row,
    key_token, key_head, value_token, value_head, sink, recent,
    D: tl.constexpr, PAGE: tl.constexpr, WINDOW: tl.constexpr, CODES: tl.constexpr, META: tl.constexpr,
    TOKENS: tl.constexpr,
):  # fmt: skip
    item = tl.program_id(2)
    head = (tl.program_id(1) // 2).to(tl.int64)
    is_value = tl.program_id(1) % 2
    first = tl.load(cu_lens + item)
    count = tl.load(cu_lens + item + 1) - first
    offset = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    if tl.program_id(0) * TOKENS < count:
        out = out_key + head * key_head
        out_token = key_token
        if is_value == 1:
            out = out_value + head * value_head
            out_token = value_token
        request = tl.load(rows + item)
        length = tl.load(seq_lens + request)
        computed = length - (tl.load(query_start + request + 1) - tl.load(query_start + request))
        position = tl.load(starts + item) + offset
        wanted = offset < count
        held = wanted & (position < length)

        # Worker tables keep the ids of freed blocks: a window entry counts only where the position allows it.
        inside = held & ((position < sink) | (position >= computed - recent))
        window_at = window_table + request.to(tl.int64) * window_table_row + position // WINDOW
        window_id = tl.load(window_at, mask=inside, other=0)
        exact = window_id != 0
        packed = held & (window_id == 0)
        page_at = block_table + request.to(tl.int64) * table_row + position // PAGE
        page_id = tl.load(page_at, mask=packed, other=0)

        page = history + page_id.to(tl.int64) * history_block + head * history_head
        slot = position % PAGE
        meta_at = (page + META + is_value * (4 * PAGE) + slot * 4).to(tl.pointer_type(tl.uint32))
        meta = tl.load(meta_at, mask=packed, other=0)
        words = (page + is_value * CODES + slot * (D // 4)).to(tl.pointer_type(tl.uint16))
        octet = tl.arange(0, D // 8)
        lane = tl.arange(0, 8)
        word = tl.load(words[:, None] + octet[None, :], mask=packed[:, None], other=0).to(tl.int32)
        code = ((word[:, :, None] >> (2 * lane)[None, None, :]) & 3).to(tl.float32)
        value = code * _half(meta & 0xFFFF)[:, None, None] + _half(meta >> 16)[:, None, None]
        channel = octet[None, :, None] * 8 + lane[None, None, :]
        result = value.to(out_key.dtype.element_ty)
        if tl.max(exact.to(tl.int32), 0) > 0:
            row = window + window_id.to(tl.int64) * window_block + head * window_head
            row += (position % WINDOW) * window_row + is_value * D
            copied = tl.load(row[:, None, None] + channel, mask=exact[:, None, None], other=0.0)
            result = tl.where(exact[:, None, None], copied.to(out_key.dtype.element_ty), result)
        to = out + (first + offset).to(tl.int64) * out_token
        tl.store(to[:, None, None] + channel, result, mask=wanted[:, None, None])


_gather = Launch(_gather_kernel)


def gather_context_triton(
    view: CacheView,
    starts: torch.Tensor,
    cu_lens: torch.Tensor,
    rows: torch.Tensor,
    out_key: torch.Tensor,
    out_value: torch.Tensor,
    max_len: int,
) -> None:
    """Cached tokens of N context pieces as plain rows, one piece after the other.

    Args:
        view: the caches and tables of R requests.
        starts: [N] int32 first position of each piece.
        cu_lens: [N + 1] int32 offsets of the pieces in the output; piece i has cu_lens[i + 1] - cu_lens[i] positions.
        rows: [N] int32 request (row of the view) of each piece.
        out_key: [>= cu_lens[N], H, D] BF16 or FP16 in transformed space; positions at or past a request's length are
            zero, rows of no piece are left alone.
        out_value: the same for values.
        max_len: the longest piece, or any upper bound (it sets the grid).
    """
    heads = view.history.shape[1]
    dim = view.window.shape[-1] // 2
    layout = PageLayout(dim)
    tokens = TILE_ELEMENTS // dim
    if rows.shape[0] == 0 or max_len == 0:
        return
    _gather(
        (cdiv(max_len, tokens), 2 * heads, rows.shape[0]),
        view.history, view.window, view.block_table, view.window_table, view.seq_lens, view.query_start,
        starts, cu_lens, rows, out_key, out_value,
        view.history.stride(0), view.history.stride(1),
        view.window.stride(0), view.window.stride(1), view.window.stride(2),
        view.block_table.stride(0), view.window_table.stride(0),
        out_key.stride(0), out_key.stride(1), out_value.stride(0), out_value.stride(1), view.sink, view.recent,
        dim, PAGE_TOKENS, WINDOW_TOKENS, layout.value_codes, layout.key_meta, tokens, num_warps=2,
    )  # fmt: skip
