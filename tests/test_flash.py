"""What prefill attends with on a GPU: the choice, and xformers asked the right way (a stub answers in float64)."""

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from oscar_vllm.backend import flash
from oscar_vllm.backend.flash import flash_attention, is_available, vllm_flash, xformers_flash


@dataclass
class SeqLenInfo:
    seqstart: torch.Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list[int]


@dataclass
class BlockDiagonalMask:
    q_seqinfo: SeqLenInfo
    k_seqinfo: SeqLenInfo


class BlockDiagonalCausalMask(BlockDiagonalMask):
    pass


@dataclass
class Inputs:
    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    attn_bias: BlockDiagonalMask
    scale: float
    is_partial: bool

    def validate_inputs(self) -> None:
        assert self.query.ndim == self.key.ndim == self.value.ndim == 5
        assert self.query.shape[2:] == self.key.shape[2:] == self.value.shape[2:]
        assert self.query.shape[3] == 1 or self.key.stride(3) == self.value.stride(3) == 0


def apply(inputs: Inputs, needs_gradient: bool) -> tuple[torch.Tensor, Any]:
    """xformers' layout: [1, T, H, G, D] in and out, log-sum-exp [1, H, G, T]; groups share keys by a stride of 0."""
    assert inputs.is_partial
    assert needs_gradient
    query, key, value, bias = inputs.query, inputs.key, inputs.value, inputs.attn_bias
    out, lse = torch.empty_like(query), torch.empty(1, *query.shape[2:4], query.shape[1])
    queries, keys = bias.q_seqinfo, bias.k_seqinfo
    for (a, b), (c, d) in zip(pairwise(queries.seqstart.tolist()), pairwise(keys.seqstart.tolist()), strict=True):
        assert b - a <= queries.max_seqlen
        assert d - c <= keys.max_seqlen
        scores = inputs.scale * torch.einsum("thgd,shgd->hgts", query[0, a:b].double(), key[0, c:d].double())
        if isinstance(bias, BlockDiagonalCausalMask):
            assert queries.seqstart_py == keys.seqstart_py
            scores = scores.masked_fill(torch.ones(b - a, d - c).triu(1).bool(), -torch.inf)
        lse[0, :, :, a:b] = scores.logsumexp(-1)
        out[0, a:b] = torch.einsum("hgts,shgd->thgd", scores.softmax(-1), value[0, c:d].double()).to(out.dtype)
    return out, SimpleNamespace(lse=lse)


@pytest.fixture
def _xformers(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    masks = SimpleNamespace(
        _SeqLenInfo=SeqLenInfo, BlockDiagonalMask=BlockDiagonalMask, BlockDiagonalCausalMask=BlockDiagonalCausalMask
    )
    operator = SimpleNamespace(FwOp=SimpleNamespace(apply=apply))
    fmha = SimpleNamespace(attn_bias=masks, Inputs=Inputs, flash=operator)
    for name in ("xformers", "xformers.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setattr(sys.modules["xformers.ops"], "fmha", fmha, raising=False)
    return


@pytest.mark.usefixtures("_xformers")
@pytest.mark.parametrize("causal", [True, False], ids=["chunk", "context"])
@pytest.mark.parametrize(("heads", "group"), [(2, 3), (1, 4), (3, 1)], ids=lambda n: str(n))
def test_xformers_gives_each_request_its_own_attention(heads: int, group: int, causal: bool) -> None:
    queries = [5, 1, 8]
    keys = queries if causal else [7, 20, 3]
    dim, scale = 16, 0.3
    # As vLLM hands them over: views of one projection's rows.
    rows = torch.randn(sum(queries), (group + 2) * heads * dim)
    query = rows[:, : group * heads * dim].unflatten(1, (group * heads, dim))
    key, value = (torch.randn(sum(keys), 2 * heads * dim)[:, heads * dim :].unflatten(1, (heads, dim)) for _ in "kv")
    out = torch.full(query.shape, torch.nan)
    offsets = [torch.tensor([0, *n]).cumsum(0).int() for n in (queries, keys)]
    lse = xformers_flash(query, key, value, *offsets, max(queries), max(keys), scale, causal, out)
    assert lse.shape == (heads * group, sum(queries))
    for (a, b), (c, d) in zip(pairwise(offsets[0].tolist()), pairwise(offsets[1].tolist()), strict=True):
        q, k, v = query[a:b].double(), *(x[c:d].double().repeat_interleave(group, 1) for x in (key, value))
        scores = scale * torch.einsum("thd,shd->hts", q, k)
        if causal:
            scores = scores.masked_fill(torch.ones(b - a, d - c).triu(1).bool(), -torch.inf)
        torch.testing.assert_close(lse[:, a:b], scores.logsumexp(-1).float())
        torch.testing.assert_close(out[a:b], torch.einsum("hts,shd->thd", scores.softmax(-1), v).float())


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Say which version of vLLM's FlashAttention and whether xformers is there."""

    def say(version: int | None, xformers: bool) -> None:
        flash_attention.cache_clear()
        monkeypatch.setattr(flash, "vllm_version", lambda head_size: version)
        monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if xformers else None)

    yield say
    flash_attention.cache_clear()


@pytest.mark.parametrize(("version", "xformers"), [(3, True), (2, False)], ids=["both", "no xformers"])
def test_vllms_flash_attention_is_taken_where_it_is(there: Any, version: int, xformers: bool) -> None:
    there(version, xformers)
    chosen = flash_attention(128)
    assert (chosen.func, chosen.args) == (vllm_flash, (version,))
    assert is_available(128)


def test_xformers_takes_its_place(there: Any) -> None:
    there(None, True)
    assert flash_attention(128) is xformers_flash
    assert is_available(128)


def test_neither_is_said(there: Any) -> None:
    there(None, False)
    assert not is_available(128)


def test_a_build_of_vllm_without_flash_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "vllm.v1.attention.backends.fa_utils", None)
    assert flash.vllm_version(128) is None
