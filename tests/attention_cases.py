"""Random activations of one layer and their attention in full, for the tests of calibration."""

import torch

from oscar_vllm.calibration.statistics import LayerStatistics

T, H, G, D = 37, 2, 3, 16


def activations(seed: int = 0, tokens: int = T, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    """Query [T, H * G, D], key, value [T, H, D] with large means, as models with key biases have."""
    generator = torch.Generator().manual_seed(seed)
    q, k, v = (torch.randn(tokens, heads, D, generator=generator, dtype=torch.float64) for heads in (H * G, H, H))
    bias = torch.randn(2, H, D, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    return [x.to(dtype) for x in (q, k + 5 * bias[0], v + bias[1])]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Causal attention in full: weights S [H * G, T, T] and output [T, H * G, D]."""
    k, v = k.repeat_interleave(G, 1), v.repeat_interleave(G, 1)
    scores = torch.einsum("qhd,khd->hqk", q, k) * D**-0.5
    mask = torch.ones(len(q), len(q), dtype=torch.bool).triu(1)
    S = scores.masked_fill(mask, -torch.inf).softmax(-1)
    return S, torch.einsum("hqk,khd->qhd", S, v)


def collect(*chunks: list[torch.Tensor]) -> LayerStatistics:
    statistics = LayerStatistics(H, D)
    for q, k, v in chunks:
        statistics.update(q, k, v, attention(q, k, v)[1])
    return statistics
