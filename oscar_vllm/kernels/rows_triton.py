# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-calls
"""Triton pieces shared by the kernels that multiply 16-bit rows by a head's split matrix (see ``operands``)."""

import os
from functools import cache

import torch
import triton
import triton.language as tl

INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
INLINE_PTX = torch.version.hip is None and not INTERPRETED.value
"""Whether kernels may use inline assembly: not in the interpreter, nor on other GPUs."""


@cache
def processor_count(device: torch.device) -> int:
    """Multiprocessors of a CUDA device (a small number on the CPU, where the interpreter runs programs in turn)."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@triton.jit
def dot16(x, y, product):
    """product + x @ y of 16-bit operands with float32 accumulation."""
    if INTERPRETED:  # which keeps BF16 as integers
        return tl.dot(x.to(tl.float32), y.to(tl.float32), product)
    return tl.dot(x, y, product)


@triton.jit
def unshuffle(x, ROWS: tl.constexpr, D: tl.constexpr):
    """[ROWS, D] in ``operands.shuffled_channels`` order -> channel order."""
    return tl.reshape(tl.permute(tl.reshape(x, (ROWS, D // 8, 4, 2)), (0, 2, 1, 3)), (ROWS, D))
