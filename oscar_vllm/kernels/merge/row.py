# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Merge kernel for small batches: one output row a program, its matrix fetched while the splits still run.

Latency counts here, not work: all splits of a row are loaded at once, and the D x D product is a sum in float32.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from oscar_vllm.kernels.decode.plan import partial_slots, request_start


@triton.jit(
    do_not_specialize=[
        "requests",
        "programs",
        "lse_stride_token",
        "heads",
        "group",
        "query_len",
        "columns",
        "column_blocks",
    ]
)
def merge_row_kernel(
    partial, partial_lse, matrix, mean, seq_lens, query_start, out, lse, requests, programs, sink, recent,
    matrix_stride_head, matrix_stride_row, mean_stride_head, out_stride_token, out_stride_head, lse_stride_token,
    heads, group, query_len, columns, column_blocks, D: tl.constexpr,
    TILE: tl.constexpr, TILE_COST: tl.constexpr, BLOCK_COST: tl.constexpr, ITEM_COST: tl.constexpr,
    MIN_CHUNK: tl.constexpr, SPLITS: tl.constexpr, CHANNELS: tl.constexpr, HAS_LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program axes: (request, query column); KV head; block of CHANNELS output channels."""
    lanes = heads * column_blocks
    row = tl.program_id(0)
    head = tl.program_id(1)
    d = tl.arange(0, D)
    c = tl.program_id(2) * CHANNELS + tl.arange(0, CHANNELS)
    channel = (d % (D // 8)) * 8 + d // (D // 8)  # partials are field-major
    back = tl.load(matrix + head * matrix_stride_head + channel[:, None] * matrix_stride_row + c[None, :])
    offset = tl.load(mean + head * mean_stride_head + c)
    request = row // (group * query_len)
    column = row % (group * query_len)
    first_token = tl.load(query_start + request)
    new = tl.load(query_start + request + 1) - first_token
    length = tl.load(seq_lens + request)
    chunk, start = request_start(
        request, seq_lens, query_start, requests, programs, sink, recent, lanes,
        TILE, TILE_COST, BLOCK_COST, ITEM_COST, MIN_CHUNK,
    )  # fmt: skip
    slot, count, gap = partial_slots(
        start, chunk, head * column_blocks + column // columns, request, length, new, sink, recent,
        lanes, TILE, TILE_COST, BLOCK_COST, ITEM_COST,
    )  # fmt: skip
    place = slot.to(tl.int64) * columns + column % columns
    if PDL:  # what comes before does not depend on the decode kernel
        gdc_wait()
    if (length > 0) & (column // group < new):
        m = -1e30
        norm = 0.0
        o = tl.zeros([SPLITS, D], tl.float32)
        for at in tl.range(0, count, SPLITS, num_stages=1):
            s = at + tl.arange(0, SPLITS)
            there = (s < count) & (s != gap)
            e = tl.load(partial_lse + place + s * columns, mask=there, other=float("-inf"))
            x = tl.load(partial + (place + s * columns)[:, None] * D + d[None, :], mask=there[:, None], other=0.0)
            m_new = tl.maximum(m, tl.max(e, 0))
            alpha = tl.exp2(m - m_new)
            weight = tl.exp2(e - m_new)
            norm = norm * alpha + tl.sum(weight, 0)
            # No weight must not mean 0 * garbage.
            o = o * alpha + tl.where((e == float("-inf"))[:, None], 0.0, x * weight[:, None])
            m = m_new
        total = tl.where(norm == 0.0, 1.0, norm)
        y = tl.sum((tl.sum(o, 0) / total)[:, None] * back, 0) + offset
        token = (first_token + column // group).to(tl.int64)
        query_head = head * group + column % group
        tl.store(out + token * out_stride_token + query_head * out_stride_head + c, y.to(out.dtype.element_ty))
        if HAS_LSE:  # noqa: SIM102
            if tl.program_id(2) == 0:
                natural = (m + tl.log2(total)) * 0.6931471805599453
                tl.store(lse + token * lse_stride_token + query_head, natural)
