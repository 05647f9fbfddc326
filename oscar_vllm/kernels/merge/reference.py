"""PyTorch twin of the merge kernel: combine partial attention outputs by their log-sum-exp, leave transformed space."""

from collections.abc import Sequence

import torch

from oscar_vllm.kernels.transform.reference import transform_queries_reference
from oscar_vllm.kernels.views import LayerRecipe


def merge_partials(parts: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine attention over disjoint key sets.

    Args:
        parts: (output [..., D], log-sum-exp [...] natural log) of each key set; an empty set has log-sum-exp -inf and
            any output.

    Returns:
        Output and log-sum-exp over the union; zero output where every set is empty.
    """
    lse = torch.stack([part[1] for part in parts])
    total = torch.logsumexp(lse, 0)
    weight = torch.where(torch.isneginf(lse), 0.0, (lse - total).exp())
    outputs = torch.stack([part[0] for part in parts])
    outputs = torch.where((weight == 0).unsqueeze(-1), 0.0, outputs)
    return (outputs * weight.unsqueeze(-1)).sum(0), total


def map_back(output: torch.Tensor, recipe: LayerRecipe) -> torch.Tensor:
    """Outputs of attention over stored values in the model's own space: ``o @ output[h] + value_mean[h]``.

    Args:
        output: [T, Hq, D] float32 in transformed space.
        recipe: the layer's transforms of H KV heads, Hq a multiple of H.

    Returns:
        [T, Hq, D] float32.
    """
    heads = recipe.output.shape[0]
    mapped = transform_queries_reference(output, recipe.output)
    return mapped + recipe.value_mean.repeat_interleave(output.shape[1] // heads, 0)
