"""Caches and float64 attention that the PyTorch twins are tested with."""

import torch

from oscar_vllm.kernels.views import CacheView

NAN, INF = float("nan"), float("inf")


def relative(actual: torch.Tensor, expected: torch.Tensor) -> float:
    return float((actual.double() - expected.double()).norm() / expected.double().norm())


def poisoned(
    blocks: int, heads: int, dim: int, dtype: torch.dtype = torch.float32
) -> tuple[torch.Tensor, torch.Tensor]:
    history = torch.full((blocks, heads, 128, dim // 2 + 8), 0xFF, dtype=torch.uint8)
    return history, torch.full((blocks, heads, 16, 2 * dim), NAN, dtype=dtype)


def cache_of(
    history: torch.Tensor, window: torch.Tensor, length: int, *, window_blocks: list[int], new: int = 1, **sizes: int
) -> CacheView:
    """One request over blocks 1, 2, ... of the history."""
    pages = -(-length // 128)
    return CacheView(
        history=history,
        window=window,
        block_table=torch.arange(1, pages + 1, dtype=torch.int32)[None],
        window_table=torch.tensor([window_blocks], dtype=torch.int32),
        seq_lens=torch.tensor([length], dtype=torch.int32),
        query_start=torch.tensor([0, new], dtype=torch.int32),
        sink=sizes.get("sink", 64),
        recent=sizes.get("recent", 256),
    )


def attention(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float, offset: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Float64 causal attention: query [N, Hq, D] at positions offset.. over keys, values [T, H, D]; output and lse."""
    group = query.shape[1] // keys.shape[1]
    q, k, v = (x.double().transpose(0, 1) for x in (query, keys, values))
    scores = q @ k.repeat_interleave(group, 0).mT * scale
    seen = torch.arange(keys.shape[0]) <= torch.arange(query.shape[0])[:, None] + offset
    scores = scores.masked_fill(~seen, -INF)
    output = scores.softmax(-1) @ v.repeat_interleave(group, 0)
    return output.transpose(0, 1), scores.logsumexp(-1).transpose(0, 1)
