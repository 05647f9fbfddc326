"""The query transform against float64, in every group size and layout."""

import pytest
import torch

DTYPES = [pytest.param(torch.bfloat16, id="bf16"), pytest.param(torch.float16, id="fp16")]


def transform(query: torch.Tensor, matrix: torch.Tensor, out_dtype: torch.dtype = torch.float32) -> torch.Tensor:
    from oscar_vllm.kernels.transform.triton import transform_queries_triton

    out = torch.full(query.shape, float("nan"), dtype=out_dtype, device=query.device)
    transform_queries_triton(query, matrix, out)
    return out


def exact(query: torch.Tensor, matrix: torch.Tensor) -> torch.Tensor:
    grouped = query.double().reshape(len(query), matrix.shape[0], -1, query.shape[2])
    return torch.einsum("thgd,hde->thge", grouped, matrix.double()).flatten(1, 2)


def check(out: torch.Tensor, query: torch.Tensor, matrix: torch.Tensor, tolerance: float) -> None:
    want = exact(query, matrix)
    error = (out.double() - want).norm(dim=-1) / want.norm(dim=-1)
    assert error.max() <= tolerance, f"worst row {error.max():.2e}"


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", [*range(1, 9), 11, 16])
def test_every_group_size(device: str, group: int, dtype: torch.dtype) -> None:
    query = torch.randn(3, 2 * group, 64, device=device).to(dtype)
    matrix = torch.randn(2, 64, 64, device=device)
    check(transform(query, matrix), query, matrix, 2e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "group", "dim"), [(1, 1, 1, 128), (17, 2, 4, 128), (7, 1, 5, 256), (41, 3, 3, 64)]
)
def test_shapes(device: str, tokens: int, heads: int, group: int, dim: int, dtype: torch.dtype) -> None:
    query = torch.randn(tokens, heads * group, dim, device=device).to(dtype)
    matrix = torch.randn(heads, dim, dim, device=device)
    check(transform(query, matrix), query, matrix, 2e-5)
    check(transform(query, matrix, dtype), query, matrix, 2 * torch.finfo(dtype).eps)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("tokens", "heads", "group", "dim"),
    [(16384, 8, 4, 128), (5001, 8, 8, 128), (3000, 1, 8, 128), (4097, 2, 6, 128), (2049, 3, 3, 64), (1000, 2, 2, 256)],
)
def test_large_shapes(tokens: int, heads: int, group: int, dim: int, dtype: torch.dtype) -> None:
    query = torch.randn(tokens, heads * group, dim, device="cuda").to(dtype)
    matrix = torch.randn(heads, dim, dim, device="cuda")
    check(transform(query, matrix), query, matrix, 2e-5)


def test_matrices_of_any_size_and_layout(device: str) -> None:
    """Entries beyond FP16's range, and a transposed matrix."""
    query = torch.randn(5, 4, 64, device=device).half()
    for factor in (1e-7, 1e6):
        matrix = factor * torch.randn(2, 64, 64, device=device).mT
        check(transform(query, matrix), query, matrix, 2e-5)


def test_a_changed_matrix_is_not_read_from_what_was_kept(device: str) -> None:
    query = torch.randn(5, 4, 64, device=device).bfloat16()
    matrix = torch.randn(2, 64, 64, device=device)
    transform(query, matrix)
    matrix.mul_(-3.0)
    check(transform(query, matrix), query, matrix, 2e-5)


def test_padded_strides(device: str) -> None:
    """Queries as a slice of a wider projection, results into a wider buffer."""
    fused = torch.full((9, 7, 64), float("nan"), dtype=torch.bfloat16, device=device)
    query = fused[:, 1:5]
    query.copy_(torch.randn(9, 4, 64))
    matrix = torch.randn(2, 64, 64, device=device)
    wide = torch.full((9, 6, 80), 7.0, device=device)
    out = wide[:, 1:5, :64]
    from oscar_vllm.kernels.transform.triton import transform_queries_triton

    transform_queries_triton(query, matrix, out)
    check(out, query, matrix, 2e-5)
    out.fill_(7.0)
    assert (wide == 7.0).all()


def test_shapes_that_disagree_are_refused(device: str) -> None:
    from oscar_vllm.kernels.transform.triton import transform_queries_triton

    query = torch.zeros(2, 5, 64, dtype=torch.bfloat16, device=device)
    with pytest.raises(ValueError, match="disagree"):
        transform_queries_triton(query, torch.zeros(2, 64, 64, device=device), torch.empty_like(query))
