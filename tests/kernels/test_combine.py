"""The combine kernel against float64: two key sets become one, rows without keys are neither read nor changed."""

import pytest
import torch
from caches import random_recipe, relative_error

from oscar_vllm.kernels.combine.reference import combine_reference

LAYOUTS = [(1, 1, 64), (2, 4, 128), (3, 3, 64), (1, 7, 128), (2, 16, 64), (1, 2, 256)]


def results(tokens: int, heads: int, dim: int, dtype: torch.dtype, device: str) -> tuple[torch.Tensor, ...]:
    """out, lse, part, part_lse with every kind of empty row, NaN where nothing may be read."""
    out, part = (torch.randn(tokens, heads, dim).to(dtype) for _ in range(2))
    lse, part_lse = (3 * torch.randn(heads, tokens) for _ in range(2))
    for rows, of, infinity in ((slice(0, None, 5), lse, -torch.inf), (slice(1, None, 5), part_lse, torch.inf)):
        of[:, rows] = infinity
    out[0::5] = float("nan")
    part[1::5] = float("nan")
    return tuple(x.to(device) for x in (out, lse, part, part_lse))


@pytest.mark.parametrize("centered", [False, True], ids=["plain", "centered"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("heads", "group", "dim"), LAYOUTS)
def test_against_float64(device: str, heads: int, group: int, dim: int, dtype: torch.dtype, centered: bool) -> None:
    from oscar_vllm.kernels.combine.triton import combine_triton

    out, lse, part, part_lse = results(23, heads * group, dim, dtype, device)
    gen = torch.Generator()
    gen.manual_seed(torch.seed() % (1 << 62))
    recipe = random_recipe(heads, dim, gen)
    query = torch.randn(23, heads * group, dim).to(dtype)
    query[1::5] = float("nan")
    wide = [x.double().cpu() for x in (out, lse, part, part_lse)]
    exact = recipe._replace(key_mean=recipe.key_mean.double(), value_mean=recipe.value_mean.double())
    combine_reference(*wide, query.double(), exact if centered else None, 0.3)
    assert wide[0].isfinite().all()
    here = recipe._replace(key_mean=recipe.key_mean.to(device), value_mean=recipe.value_mean.to(device))
    combine_triton(out, lse, part, part_lse, query.to(device), here if centered else None, 0.3)
    # The interpreter truncates to BF16 where a GPU rounds.
    limit = {torch.bfloat16: 4e-3 if device == "cuda" else 8e-3, torch.float16: 5e-4, torch.float32: 2e-6}[dtype]
    assert max(relative_error(out, wide[0])) < limit
    torch.testing.assert_close(lse.cpu().double(), wide[1], rtol=1e-5, atol=2e-5)


def test_against_attention_over_all_keys() -> None:
    """The definition: attention over two key sets, combined, is attention over their union, means included."""
    gen = torch.Generator().manual_seed(3)
    dim, scale = 16, 0.25
    recipe = random_recipe(1, dim, gen)
    recipe = recipe._replace(**{k: v.double() for k, v in recipe._asdict().items() if isinstance(v, torch.Tensor)})
    q, k, v = (torch.randn(9, 2, dim, generator=gen, dtype=torch.float64) for _ in range(3))

    def attend(key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        scores = scale * torch.einsum("thd,sd->hts", q, key)
        return torch.einsum("hts,sd->thd", scores.softmax(-1), value), scores.logsumexp(-1)

    key, value = k[:, 0], v[:, 0]
    out, lse = attend(key[:4], value[:4])
    part, part_lse = attend(key[4:] - recipe.key_mean, value[4:] - recipe.value_mean)
    combine_reference(out, lse, part, part_lse, q, recipe, scale)
    want, want_lse = attend(key, value)
    torch.testing.assert_close(out, want)
    torch.testing.assert_close(lse, want_lse)


@pytest.mark.parametrize("rows", [slice(0, 7), slice(5, 19)], ids=["front", "middle"])
def test_slices_of_larger_tensors(device: str, rows: slice) -> None:
    from oscar_vllm.kernels.combine.triton import combine_triton

    out, lse, part, part_lse = results(23, 6, 64, torch.float32, device)
    before = [x.clone() for x in (out, lse)]
    want = [x[rows].clone() if x.dim() == 3 else x[:, rows].clone() for x in (out, lse, part, part_lse)]
    combine_reference(*want)
    combine_triton(out[rows], lse[:, rows], part[rows], part_lse[:, rows].contiguous())
    torch.testing.assert_close(out[rows], want[0])
    torch.testing.assert_close(lse[:, rows], want[1])
    for now, then in ((out, before[0]), (lse.mT, before[1].mT)):
        torch.testing.assert_close(now[: rows.start], then[: rows.start], equal_nan=True)
        torch.testing.assert_close(now[rows.stop :], then[rows.stop :], equal_nan=True)


def test_shapes_that_disagree_are_refused(device: str) -> None:
    from oscar_vllm.kernels.combine.triton import combine_triton

    out, lse, part, part_lse = results(5, 4, 64, torch.float32, device)
    with pytest.raises(ValueError, match="disagree"):
        combine_triton(out, lse[:, :4], part, part_lse)
