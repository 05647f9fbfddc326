# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Query transform on tensor cores: every query row times its KV head's D x D matrix."""

import torch
import triton
import triton.language as tl

from oscar_vllm.kernels.launch import Launch, cdiv
from oscar_vllm.kernels.operands import query_operands
from oscar_vllm.kernels.rows_triton import dot16, processor_count


@triton.jit(do_not_specialize=["tokens", "group"])
def _transform_kernel(
    query, matrix, inverse, out, tokens, query_token, query_head, out_token, out_head, group,
    D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """Program axis 0 is a KV head and a block of COLUMNS output channels; axis 1 shares the tiles of ROWS query rows.

    Row r of a head's T * G is token r // G, query head r % G.
    """
    lane = tl.program_id(0)
    head = lane // (D // COLUMNS)
    channel = (lane % (D // COLUMNS)) * COLUMNS + tl.arange(0, COLUMNS)
    part = tl.arange(0, BLOCK)
    scale = tl.load(inverse + head)
    matrix += head * (2 * D * D)
    if BLOCK == D:  # the matrix stays on chip
        at = matrix + part[:, None] * D + channel[None, :]
        high = tl.load(at)
        low = tl.load(at + D * D)
    for tile in tl.range(tl.program_id(1), tl.cdiv(tokens * group, ROWS), tl.num_programs(1)):
        row = tile * ROWS + tl.arange(0, ROWS)
        live = row < tokens * group
        token = (row // group).to(tl.int64)
        query_head_of = head * group + row % group
        at_row = query + token * query_token + query_head_of * query_head
        product = tl.zeros([ROWS, COLUMNS], tl.float32)
        if BLOCK == D:
            x = tl.load(at_row[:, None] + part[None, :], mask=live[:, None], other=0.0)
            product = dot16(x, low, product)
            product = dot16(x, high, product)
        else:
            for start in tl.range(0, D, BLOCK, num_stages=1):
                x_part = tl.load(at_row[:, None] + (start + part)[None, :], mask=live[:, None], other=0.0)
                at_part = matrix + (start + part)[:, None] * D + channel[None, :]
                product = dot16(x_part, tl.load(at_part + D * D), product)
                product = dot16(x_part, tl.load(at_part), product)
        to = out + token * out_token + query_head_of * out_head
        result = (product * scale).to(out.dtype.element_ty)
        tl.store(to[:, None] + channel[None, :], result, mask=live[:, None])


_transform = Launch(_transform_kernel)


def transform_queries_triton(query: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
    """``out[t, h] = query[t, h] @ matrix[h // G]``.

    Args:
        query: [T, Hq, D] BF16 or FP16, any strides with a contiguous last dim.
        matrix: [H, D, D] float32; G = Hq / H query heads share one.
        out: [T, Hq, D] of any floating type, any strides with a contiguous last dim.
    """
    tokens, heads, dim = query.shape[0], matrix.shape[0], query.shape[2]
    group = query.shape[1] // heads
    if query.shape != out.shape or query.shape[1] != heads * group or matrix.shape[2] != dim:
        shapes = ", ".join(str(tuple(x.shape)) for x in (query, matrix, out))
        raise ValueError(f"query, matrix and out disagree: {shapes}")
    if query.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("query and out need a contiguous last dimension")
    if tokens == 0:
        return
    operands = query_operands(matrix, query.dtype)
    processors = processor_count(query.device)
    small = tokens * group * heads <= 16 * 8 * processors
    if small:  # latency counts: spread one head's channels over programs
        rows, columns, block, warps = 16, 32, dim, 4
        programs = cdiv(tokens * group, rows)
    else:
        rows, columns, block, warps = 64, min(dim, 128), dim if dim <= 128 else 64, 4
        programs = min(cdiv(tokens * group, rows), max(1, 2 * processors * columns // (heads * dim)))
    _transform(
        (heads * (dim // columns), programs, 1),
        query, *operands, out, tokens, query.stride(0), query.stride(1), out.stride(0), out.stride(1), group,
        dim, rows, block, columns, num_warps=warps,
    )  # fmt: skip
