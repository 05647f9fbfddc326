"""Prefill on the CPU: exact attention inside the chunk, cached context in bounded tiles, merged by log-sum-exp."""

import torch

from oscar_vllm.cache.layout import PAGE_TOKENS
from oscar_vllm.kernels.context.reference import gather_reference
from oscar_vllm.kernels.merge.reference import map_back, merge_partials
from oscar_vllm.kernels.transform.reference import transform_queries_reference
from oscar_vllm.kernels.views import CacheView, LayerRecipe

CONTEXT_TILE = 8 * PAGE_TOKENS
"""Context tokens unpacked at a time, whatever the length of the context."""


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of query [N, Hq, D] over key, value [H, T, D]: output [N, Hq, D], log-sum-exp [N, Hq] (natural)."""
    group = query.shape[1] // key.shape[0]
    output, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        query.transpose(0, 1)[None],
        key.repeat_interleave(group, 0)[None],
        value.repeat_interleave(group, 0)[None],
        is_causal=causal,
        scale=scale,
    )
    return output[0].transpose(0, 1), lse[0].transpose(0, 1)


def prefill_cpu(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    view: CacheView,
    context: int,
    recipe: LayerRecipe,
    scale: float,
    out: torch.Tensor,
) -> None:
    """One request's chunk: causal attention to itself, raw and exact, and to ``context`` cached tokens before it.

    Args:
        query: [N, Hq, D] raw queries of the chunk.
        key: [N, H, D] raw keys of the chunk.
        value: [N, H, D] raw values of the chunk.
        view: the caches and tables of this one request.
        context: tokens computed before this chunk.
        recipe: the layer's transforms.
        scale: softmax scale.
        out: [N, Hq, D], written in its own dtype.
    """
    if context == 0:
        out.copy_(_flash(query, key.transpose(0, 1), value.transpose(0, 1), scale, causal=True)[0])
        return
    heads, group = key.shape[1], query.shape[1] // key.shape[1]
    exact = query.float()
    chunk = _flash(exact, key.transpose(0, 1).float(), value.transpose(0, 1).float(), scale, causal=True)
    transformed = transform_queries_reference(query, recipe.query)
    parts = []
    for start in range(0, context, CONTEXT_TILE):
        keys, values = gather_reference(view, start, min(start + CONTEXT_TILE, context))
        parts.append(_flash(transformed, keys[0], values[0], scale, causal=False))
    output, lse = merge_partials(parts)
    # Cached keys are centered, the chunk's are not: their scores differ by the query's product with the mean.
    shift = torch.einsum("thgd,hd->thg", exact.unflatten(1, (heads, group)), recipe.key_mean).flatten(1, 2)
    out.copy_(merge_partials([chunk, (map_back(output, recipe), lse + scale * shift)])[0])
