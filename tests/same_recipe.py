"""Whether calibration on several tensor-parallel ranks gave the recipe of one."""

import torch

from oscar_vllm.recipe import OscarRecipe
from oscar_vllm.recipe_format import CLIPS, GAINS, MATRICES, MEANS

ROUNDED = 1e-3
"""Of means and transforms, to their largest entry: what float16 and the order of a sum make of them (2e-4)."""
CLIP_STEP, GAIN_STEP = 0.041, 0.031
"""Rounding may make a neighbour on the search's grid the better one."""


def apart(one: OscarRecipe, other: OscarRecipe) -> dict[str, torch.Tensor]:
    """[L, H] largest difference of means and of transforms, to the largest entry.

    Of transforms what they make of lengths: how they turn rows hangs on eigenvalues that lie close together.
    """
    found = {}
    for name in (*MATRICES, *MEANS):
        pair = [recipe.tensors()[name].double() for recipe in (one, other)]
        if name in MATRICES:
            pair = [x.mT @ x if name == "output" else x @ x.mT for x in pair]
        a, b = (x.flatten(2) for x in pair)
        found[name] = (a - b).abs().amax(-1) / a.abs().amax(-1)
    return found


def errors(recipe: OscarRecipe) -> torch.Tensor:
    """[2, L, H] of keys and values on the held-out samples."""
    found = recipe.metadata.diagnostics
    assert found is not None
    return torch.tensor([found.key.error, found.value.error])


def check_same_recipe(of_one: OscarRecipe, of_two: OscarRecipe) -> None:
    """Statistics, held-out samples and output weights of two ranks' heads, each where it belongs."""
    assert max(found.max() for found in apart(of_one, of_two).values()) <= ROUNDED
    for names, step in ((CLIPS, CLIP_STEP), (GAINS, GAIN_STEP)):
        for name in names:
            assert (of_one.tensors()[name] - of_two.tensors()[name]).abs().max() <= step
    # No sum over ranks comes before the first layer's heads, so that its transforms are turned alike.
    first, found = errors(of_one)[:, 0], errors(of_two)[:, 0]
    torch.testing.assert_close(found, first, rtol=0.01, atol=0)
    # What the two ranks' heads in each other's place would look like, in some head of keys and of values at least.
    share = first.shape[-1] // 2
    swapped = {name: tensor.roll(share, 1) for name, tensor in of_one.tensors().items()}
    exchanged = apart(of_one, OscarRecipe(**swapped, metadata=of_one.metadata))
    assert min(found.min() for found in exchanged.values()) > 100 * ROUNDED
    assert ((first.roll(share, 1) - first).abs() / first).amax(-1).min() > 0.04
