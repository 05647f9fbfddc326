"""Matrices as tensor cores multiply them: two parts that add up, whatever type PyTorch makes tensors of by default."""

import pytest
import torch

from oscar_vllm.kernels.operands import split_matrices


@pytest.mark.parametrize("default", [torch.float32, torch.bfloat16, torch.float16], ids=["fp32", "bf16", "fp16"])
@pytest.mark.parametrize("size", [1e-4, 1.0, 1e4], ids="size {:.0e}".format)
@pytest.mark.parametrize(
    ("dtype", "lost"), [(torch.bfloat16, 2.0**-16), (torch.float16, 2.0**-21)], ids=["bf16", "fp16"]
)
def test_parts_add_up_under_any_default_type(
    dtype: torch.dtype, lost: float, size: float, default: torch.dtype
) -> None:
    """vLLM loads a model, and warms the kernels up, under the model's own type."""
    matrix = size * torch.randn(3, 64, 64, dtype=torch.float32)
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        split = split_matrices(matrix, dtype)
    finally:
        torch.set_default_dtype(before)
    assert (split.parts.dtype, split.inverse.dtype) == (dtype, torch.float32)
    whole = split.parts.double().sum(1) * split.inverse.double()[:, None, None]
    largest = matrix.abs().amax((1, 2), keepdim=True).double()
    assert ((whole - matrix.double()).abs() <= lost * largest).all()
