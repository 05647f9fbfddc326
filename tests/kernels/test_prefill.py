"""Prefill on a GPU, piece by piece: raw chunk, context tiles, combination, against attention in float64."""

from itertools import pairwise

import pytest
import torch
from caches import Case, random_case, relative_error

from oscar_vllm.backend.context_plan import plan_prefill
from oscar_vllm.backend.flash import Flash, flash_attention, xformers_flash
from oscar_vllm.kernels.views import LayerRecipe


def flash_twin(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    cu_query: torch.Tensor,
    cu_keys: torch.Tensor,
    longest_query: int,
    longest_keys: int,
    scale: float,
    causal: bool,
    out: torch.Tensor,
) -> torch.Tensor:
    """What FlashAttention computes; empty key sets leave garbage and an infinite log-sum-exp."""
    lse = torch.full((query.shape[1], query.shape[0]), float("nan"), device=query.device)
    group = query.shape[1] // key.shape[1]
    starts, ends = cu_query.tolist(), cu_keys.tolist()
    assert longest_query >= max(b - a for a, b in pairwise(starts))
    assert longest_keys >= max(b - a for a, b in pairwise(ends))
    for i in range(len(starts) - 1):
        q = query[starts[i] : starts[i + 1]].double()
        k, v = (x[ends[i] : ends[i + 1]].double().repeat_interleave(group, 1) for x in (key, value))
        scores = scale * torch.einsum("thd,shd->hts", q, k)
        if causal:
            scores = scores.masked_fill(torch.ones(q.shape[0], k.shape[0]).triu(1).bool(), -torch.inf)
        if k.shape[0] == 0:
            lse[:, starts[i] : starts[i + 1]] = torch.inf
            out[starts[i] : starts[i + 1]] = float("nan")
            continue
        lse[:, starts[i] : starts[i + 1]] = scores.logsumexp(-1).float()
        out[starts[i] : starts[i + 1]] = torch.einsum("hts,shd->thd", scores.softmax(-1), v).to(out.dtype)
    return lse


def attend_float64(case: Case, key: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
    """[T, Hq, D]: raw keys inside the chunk, what the caches hold (mapped back to raw space) before it."""
    recipe = LayerRecipe(*(x.double() if isinstance(x, torch.Tensor) else x for x in case.recipe))
    start = case.view.query_start.tolist()
    group = case.query.shape[1] // key.shape[1]
    out = torch.full(case.query.shape, float("nan"), dtype=torch.float64)
    for r, (cached_key, cached_value) in enumerate(zip(case.keys, case.values, strict=True)):
        rows = slice(start[r], start[r + 1])
        new = start[r + 1] - start[r]
        if not new:
            continue
        context = len(cached_key) - new
        back = torch.einsum("lhd,hed->lhe", cached_key[:context], recipe.query) + recipe.key_mean
        k = torch.cat([back, key[rows].double()]).repeat_interleave(group, 1)
        back = torch.einsum("lhd,hde->lhe", cached_value[:context], recipe.output) + recipe.value_mean
        v = torch.cat([back, value[rows].double()]).repeat_interleave(group, 1)
        scores = case.scale * torch.einsum("thd,shd->hts", case.query[rows].double(), k)
        future = torch.arange(len(k)) > context + torch.arange(new)[:, None]
        scores = scores.masked_fill(future, -torch.inf)
        out[rows] = torch.einsum("hts,shd->thd", scores.softmax(-1), v)
    return out


BATCHES = pytest.mark.parametrize(
    ("lengths", "new"),
    [
        ([40], [40]),
        ([300], [20]),
        ([300, 33, 700, 260], [20, 33, 9, 130]),
        ([500, 0, 140], [250, 0, 12]),
        ([1, 5, 300, 290], [1, 2, 17, 30]),
    ],
    ids=["first-chunk", "one-context", "mixed", "padding-between", "behind-decodes"],
)


def check(
    device: str, flash: Flash, heads: int, group: int, dim: int, lengths: list[int], new: list[int], tile: int
) -> None:
    from oscar_vllm.backend.prefill_cuda import prefill_cuda

    case = random_case(lengths, new, heads=heads, group=group, dim=dim, missing=0.2, sink=64, recent=128)
    tokens = sum(new)
    key, value = (torch.randn(tokens, heads, dim).to(case.query.dtype) for _ in range(2))
    want = attend_float64(case, key, value)[:tokens]
    first = sum(n <= 8 for n in new) if new[0] <= 8 else 0
    starts = case.view.query_start.tolist()
    plan = plan_prefill(first, starts[first:], lengths[first:], tile, torch.device(device))
    here = case.to(device)
    rows = slice(plan.first_token, plan.first_token + plan.tokens)
    shape = (plan.tokens + 3, heads * group, dim)
    context = (tile, heads, dim)
    workspace = [
        torch.full(s, float("nan"), dtype=case.query.dtype, device=device)
        for s in (context, context, shape, shape, shape)
    ]
    out = torch.full((tokens, *shape[1:]), float("nan"), dtype=case.query.dtype, device=device)
    prefill_cuda(
        here.query[rows],
        key[rows].to(device),
        value[rows].to(device),
        here.view,
        plan,
        here.recipe,
        case.scale,
        out[rows],
        workspace,
        flash,
    )
    assert out[: rows.start].isnan().all(), "decodes were written"
    # Queries, dequantized rows, partial results and output are each rounded to BF16.
    assert relative_error(out[rows], want[rows])[0] < 1e-2


@pytest.mark.parametrize("tile", [128, 256, 4096], ids=lambda t: f"tile{t}")
@BATCHES
@pytest.mark.parametrize(("heads", "group", "dim"), [(1, 3, 64), (2, 4, 128)])
def test_against_float64(
    device: str, heads: int, group: int, dim: int, lengths: list[int], new: list[int], tile: int
) -> None:
    flash = flash_attention(dim) if device == "cuda" else flash_twin
    check(device, flash, heads, group, dim, lengths, new, tile)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@BATCHES
@pytest.mark.parametrize(("heads", "group", "dim"), [(1, 3, 64), (2, 4, 128), (3, 1, 128), (1, 2, 256)])
def test_xformers_against_float64(heads: int, group: int, dim: int, lengths: list[int], new: list[int]) -> None:
    """Where vLLM's FlashAttention is not there."""
    pytest.importorskip("xformers.ops.fmha", reason="xformers is not installed")
    check("cuda", xformers_flash, heads, group, dim, lengths, new, 256)
