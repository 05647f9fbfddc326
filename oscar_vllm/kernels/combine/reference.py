"""PyTorch twin of the combine kernel: two attention results over disjoint keys become one, in place."""

import torch

from oscar_vllm.kernels.views import LayerRecipe


def combine_reference(
    out: torch.Tensor,
    lse: torch.Tensor,
    part: torch.Tensor,
    part_lse: torch.Tensor,
    query: torch.Tensor | None = None,
    recipe: LayerRecipe | None = None,
    scale: float = 1.0,
) -> None:
    """Add ``part`` to ``out`` by log-sum-exp.

    With a ``recipe``, ``part`` is attention over cached tokens, already mapped back by ``recipe.output`` but still
    centered: its values miss ``value_mean`` and its scores miss ``scale * query . key_mean``, which are added here.
    Without, both are results in the same space.

    Args:
        out: [T, Hq, D] of any float dtype, updated; not read where ``lse`` is infinite.
        lse: [Hq, T] float32 natural log-sum-exp, updated; +-inf where ``out`` covers no key.
        part: [T, Hq, D]; not read where ``part_lse`` is infinite.
        part_lse: [Hq, T] float32.
        query: [T, Hq, D] the model's own queries; needed with a recipe only.
        recipe: the layer's transforms of H KV heads, Hq a multiple of H.
        scale: softmax scale.
    """
    first = torch.where(lse.isinf(), -torch.inf, lse).mT
    second = torch.where(part_lse.isinf(), -torch.inf, part_lse).mT
    added = part.float()
    if recipe is not None:
        assert query is not None
        group = out.shape[1] // recipe.key_mean.shape[0]
        shift = scale * (query.float() * recipe.key_mean.repeat_interleave(group, 0)).sum(-1)
        second = torch.where(second.isneginf(), second, second + shift)
        added = added + recipe.value_mean.repeat_interleave(group, 0)
    total = torch.logaddexp(first, second)

    def weighted(rows: torch.Tensor, part_of: torch.Tensor) -> torch.Tensor:
        weight = torch.where(part_of.isneginf(), 0.0, (part_of - total).exp())[..., None]
        return torch.where(weight == 0, 0.0, rows * weight)

    out.copy_(weighted(out.float(), first) + weighted(added, second))
    lse.copy_(total.mT)
