"""xformers' Triton attention as an independent oracle: of the 16-bit segments alone, and merged with the history."""

from typing import Any

import pytest
import torch
from caches import Case, random_case, relative_error

from oscar_vllm.bench.contenders import split_k_attention
from oscar_vllm.kernels.decode.triton import decode_triton
from oscar_vllm.kernels.merge.triton import merge_triton

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]


@pytest.fixture
def fmha() -> Any:
    return pytest.importorskip("xformers.ops.fmha", reason="xformers is not installed")


def partial(
    fmha: Any, case: Case, keys: list[torch.Tensor], values: list[torch.Tensor]
) -> tuple[torch.Tensor, torch.Tensor]:
    """xformers' output [T, Hq, D] and natural log-sum-exp [T, Hq] over each request's keys [L, H, D]."""
    new = case.view.query_start.diff().tolist()
    tokens, heads, dim = sum(new), keys[0].shape[1], keys[0].shape[2]
    lengths = [len(k) for k in keys]
    padding = max(lengths)
    both = torch.zeros(2, len(keys), padding, heads, 1, dim, dtype=case.query.dtype)
    for r, (k, v) in enumerate(zip(keys, values, strict=True)):
        both[0, r, : len(k), :, 0], both[1, r, : len(v), :, 0] = k, v
    group = case.query.shape[1] // heads
    key, value = both.cuda().flatten(1, 2)[:, None].expand(-1, -1, -1, -1, group, -1)
    query = case.query[:tokens].cuda().unflatten(1, (heads, group))[None]
    bias = fmha.attn_bias.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(
        q_seqlen=new, kv_padding=padding, kv_seqlen=lengths, device="cuda"
    )
    out, lse = split_k_attention(query, key, value, bias, case.scale, partial=True)
    assert lse is not None
    return out[0].flatten(1, 2), lse[0].permute(2, 0, 1).flatten(1, 2)


def attend_transformed(case: Case) -> tuple[torch.Tensor, torch.Tensor]:
    """The kernels' output and log-sum-exp where queries and outputs are taken to be transformed already."""
    case = case.to("cuda")
    recipe = case.recipe._replace(
        output=torch.eye(case.query.shape[2], device="cuda").expand_as(case.recipe.output).contiguous(),
        value_mean=torch.zeros_like(case.recipe.value_mean),
    )
    out = torch.full(case.query.shape, float("nan"), device="cuda")
    lse = torch.full(case.query.shape[:2], float("nan"), device="cuda")
    partials = decode_triton(case.query, case.view, case.scale, max_query_len=case.max_query_len)
    merge_triton(partials, case.view, recipe, out, lse)
    tokens = int(case.view.query_start[-1])
    return out[:tokens], lse[:tokens]


def check(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor]) -> None:
    """Apart by no more than the 16-bit probabilities and outputs of the oracle."""
    overall, worst = relative_error(got[0], want[0].double().cpu())
    assert overall <= 5e-3
    assert worst <= 1.5e-2
    torch.testing.assert_close(got[1], want[1].float(), rtol=1e-3, atol=5e-3)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
@pytest.mark.parametrize(
    ("heads", "group", "dim", "new"),
    [(2, 4, 128, 1), (1, 8, 128, 1), (2, 4, 64, 4), (1, 16, 128, 2), (1, 4, 256, 1)],
)
def test_windows(fmha: Any, heads: int, group: int, dim: int, new: int, dtype: torch.dtype) -> None:
    """Sink and recent hold all of each request."""
    lengths = [700, 130, 17, 320]
    case = random_case(lengths, new, heads=heads, group=group, dim=dim, dtype=dtype, sink=64, recent=1024)
    check(attend_transformed(case), partial(fmha, case, case.keys, case.values))


def test_windows_and_history_merged(fmha: Any) -> None:
    """The history restored to FP16 and the windows apart, merged by ``merge_attentions``, are the whole."""
    case = random_case([1000, 500, 2777], heads=2, group=4, dim=128, dtype=torch.float16)
    parts = []
    for windowed in (False, True):
        chosen = [
            (((p := torch.arange(len(k))) < case.view.sink) | (p >= len(k) - 1 - case.view.recent)) == windowed
            for k in case.keys
        ]
        keys = [k[c] for k, c in zip(case.keys, chosen, strict=True)]
        parts.append(partial(fmha, case, keys, [v[c] for v, c in zip(case.values, chosen, strict=True)]))
    outs, lses = (torch.stack(part)[:, None] for part in zip(*parts, strict=True))
    out, lse = fmha.merge_attentions(outs, lses.mT.contiguous())
    check(attend_transformed(case), (out[0], lse[0].T))
