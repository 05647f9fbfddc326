"""Triton pieces shared by the kernels that multiply rows by a head's D x D matrix at float32 accuracy.

Tensor cores take 16-bit operands, so a float32 operand is the sum of two fp16 numbers (22 bits of mantissa), both
factors scaled by powers of two into fp16's range: ``x @ M = xh @ Mh + xh @ Ml + xl @ Mh`` up to 2^-22. Compared with
three tf32 products this is as accurate and takes half the time; three bf16 products lose six bits.
"""

import os
from functools import cache

import torch
import triton
import triton.language as tl

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
"""Inline assembly does not run in the interpreter."""


@cache
def processor_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device (a small number on the CPU, where the interpreter runs programs in turn)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def power_of_two(largest):
    """Power of two that brings ``largest`` (>= 0, float32) below 2^10, and its inverse."""
    exponent = (largest.to(tl.int32, bitcast=True) >> 23) & 255
    exponent = tl.maximum(exponent, 10)
    factor = ((263 - exponent) << 23).to(tl.float32, bitcast=True)
    inverse = ((exponent - 9) << 23).to(tl.float32, bitcast=True)
    return factor, inverse


@triton.jit
def split_half(x):
    """float32 -> (high, low) fp16 with high + low = x to 22 bits."""
    high = x.to(tl.float16)
    return high, (x - high.to(tl.float32)).to(tl.float16)


@triton.jit
def shuffled_channels(D: tl.constexpr):
    """[D] channel of each column of a shuffled product.

    A tensor core leaves columns 2q, 2q + 1 of every eight with lane q of four. With the columns in this order each
    lane ends up with D/4 consecutive channels, so that packing and row sums stay inside a thread.
    """
    column = tl.arange(0, D)
    return ((column // 2) % 4) * (D // 4) + (column // 8) * 2 + column % 2


@triton.jit
def unshuffle(x, ROWS: tl.constexpr, D: tl.constexpr):
    """[ROWS, D] in ``shuffled_channels`` order -> channel order."""
    return tl.reshape(tl.permute(tl.reshape(x, (ROWS, D // 8, 4, 2)), (0, 2, 1, 3)), (ROWS, D))


@triton.jit
def matrix_scale(matrix, row_stride, column_stride, D: tl.constexpr, BLOCK: tl.constexpr):
    """(factor, inverse) powers of two for a [D, D] float32 matrix."""
    column = tl.arange(0, D)
    row = tl.arange(0, BLOCK)
    largest = tl.zeros([BLOCK], tl.float32)
    for start in range(0, D, BLOCK):
        part = tl.load(matrix + (start + row)[:, None] * row_stride + column[None, :] * column_stride)
        largest = tl.maximum(largest, tl.max(tl.abs(part), 1))
    return power_of_two(tl.max(largest, 0))


@triton.jit
def multiply_halves(high, low, matrix_high, matrix_low, product):
    """product + (high + low) @ (matrix_high + matrix_low) without the term below float32's accuracy."""
    product = tl.dot(low, matrix_high, product)
    product = tl.dot(high, matrix_low, product)
    return tl.dot(high, matrix_high, product)
