"""Query transform on tensor cores: every query row times its KV head's D x D matrix.

Queries are exact in their 16-bit type, so only the matrix is split in two: the product is good to 2^-17 for BF16 and
2^-22 for FP16, far below the rounding of a 16-bit result.
"""

import torch
import triton
import triton.language as tl

from oscar_vllm.kernels.rows_triton import power_of_two, processor_count


@triton.jit
def _largest(matrix, D: tl.constexpr, BLOCK: tl.constexpr):
    """Largest |element| of a contiguous [D, D] float32 matrix."""
    column = tl.arange(0, D)
    largest = tl.zeros([D], tl.float32)
    for start in range(0, D, BLOCK):
        part = tl.load(matrix + (start + tl.arange(0, BLOCK))[:, None] * D + column[None, :])
        largest = tl.maximum(largest, tl.max(tl.abs(part), 0))
    return tl.max(largest, 0)


@triton.jit
def _split_as(x, dtype: tl.constexpr):
    """float32 -> (high, low) in a 16-bit type."""
    high = x.to(dtype)
    return high, (x - high.to(tl.float32)).to(dtype)


@triton.jit
def transform_rows(
    query, matrix, out, tokens, query_token, query_head, out_token, out_head, head, first, step,
    G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Tiles ``first, first + step, ...`` of the T * G query rows of one KV head; row r is token r // G, head r % G."""
    dtype: tl.constexpr = query.dtype.element_ty
    channel = tl.arange(0, D)
    part = tl.arange(0, BLOCK)
    matrix += head * D * D
    if BLOCK == D:  # the matrix stays on chip
        whole = tl.load(matrix + channel[:, None] * D + channel[None, :])
        factor, inverse = power_of_two(tl.max(tl.max(tl.abs(whole), 1), 0))
        high, low = _split_as(whole * factor, dtype)
    else:
        factor, inverse = power_of_two(_largest(matrix, D, BLOCK))
    for tile in tl.range(first, tl.cdiv(tokens * G, ROWS), step, num_stages=1):
        row = tile * ROWS + tl.arange(0, ROWS)
        live = row < tokens * G
        token = (row // G).to(tl.int64)
        query_head_of = head * G + row % G
        at = query + token * query_token + query_head_of * query_head
        product = tl.zeros([ROWS, D], tl.float32)
        if BLOCK == D:
            x = tl.load(at[:, None] + channel[None, :], mask=live[:, None], other=0.0)
            product = tl.dot(x, low, product)
            product = tl.dot(x, high, product)
        else:
            for start in tl.range(0, D, BLOCK, num_stages=1):
                x_part = tl.load(at[:, None] + (start + part)[None, :], mask=live[:, None], other=0.0)
                block = tl.load(matrix + (start + part)[:, None] * D + channel[None, :])
                block_high, block_low = _split_as(block * factor, dtype)
                product = tl.dot(x_part, block_low, product)
                product = tl.dot(x_part, block_high, product)
        to = out + token * out_token + query_head_of * out_head
        result = (product * inverse).to(out.dtype.element_ty)
        tl.store(to[:, None] + channel[None, :], result, mask=live[:, None])


@triton.jit
def _transform_kernel(
    query, matrix, out, tokens, query_token, query_head, out_token, out_head,
    G: tl.constexpr, D: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    transform_rows(
        query, matrix, out, tokens, query_token, query_head, out_token, out_head,
        tl.program_id(0), tl.program_id(1), tl.num_programs(1), G, D, ROWS, BLOCK,
    )  # fmt: skip


def check_queries(query: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> int:
    """The group size G; raises where shapes or strides are not what the kernel takes."""
    heads, dim = matrix.shape[0], matrix.shape[-1]
    if query.shape != out.shape or query.shape[1] % heads or query.shape[2] != dim:
        raise ValueError(
            f"query {tuple(query.shape)}, matrix {tuple(matrix.shape)} and out {tuple(out.shape)} disagree"
        )
    if query.stride(2) != 1 or out.stride(2) != 1:
        raise ValueError("query and out need a contiguous last dimension")
    return int(query.shape[1] // heads)


def transform_queries_triton(query: torch.Tensor, matrix: torch.Tensor, out: torch.Tensor) -> None:
    """``out[t, h] = query[t, h] @ matrix[h // G]``.

    Args:
        query: [T, Hq, D] BF16 or FP16, any strides with a contiguous last dim.
        matrix: [H, D, D] float32; G = Hq / H query heads share one.
        out: [T, Hq, D] of any floating type, any strides with a contiguous last dim.
    """
    group = check_queries(query, matrix, out)
    tokens, heads, dim = query.shape[0], matrix.shape[0], query.shape[2]
    if tokens == 0:
        return
    processors = processor_count(query.device)
    small = tokens * group * heads <= 16 * 4 * processors
    rows = 16 if small else 64
    programs = triton.cdiv(tokens * group, rows)
    if not small and dim <= 128:
        programs = min(programs, max(1, 2 * processors // heads))
    _transform_kernel[(heads, programs)](
        query, matrix.contiguous(), out, tokens,
        query.stride(0), query.stride(1), out.stride(0), out.stride(1),
        G=group, D=dim, ROWS=rows, BLOCK=dim if dim <= 128 else 64, num_warps=4 if dim <= 128 else 8,
    )  # fmt: skip
