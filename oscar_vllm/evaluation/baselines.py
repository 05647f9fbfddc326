"""Recipes of the methods that ours is compared with: naive INT2, and OSCAR as it was published."""

from collections.abc import Sequence

import torch

from oscar_vllm.calibration.statistics import LayerStatistics
from oscar_vllm.calibration.transforms import rotation
from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.recipe import KEY_CLIP, VALUE_CLIP, OscarRecipe, RecipeMetadata


def naive_recipe(geometry: ModelGeometry, model: str) -> OscarRecipe:
    """Plain INT2: keys and values as they are, the whole range of a row in four steps, no centering."""
    eye = torch.eye(geometry.head_size).expand(geometry.num_layers, 1, -1, -1)
    return _rotation_recipe(geometry, model, "naive", eye, eye, clips=(1.0, 1.0), text_hash="", tokens=0)


def published_recipe(
    statistics: Sequence[LayerStatistics], geometry: ModelGeometry, *, model: str, text_hash: str, tokens: int
) -> OscarRecipe:
    """OSCAR as published (arXiv 2605.17757): one rotation per layer, clips 0.96 and 0.92, not centered.

    The value covariance is exact (OᵀO); the published code approximates it with key norms. ``tokens`` of a text of
    ``text_hash`` were prefilled for the statistics, which leave the sinks out.
    """
    key = torch.stack([rotation(layer.query_covariance.mean(0).cpu()) for layer in statistics])
    value = torch.stack([rotation(layer.output_covariance().mean(0).cpu()) for layer in statistics])
    return _rotation_recipe(
        geometry,
        model,
        "oscar-published",
        key[:, None],
        value[:, None],
        clips=(KEY_CLIP, VALUE_CLIP),
        text_hash=text_hash,
        tokens=tokens,
    )


def _rotation_recipe(
    geometry: ModelGeometry,
    model: str,
    method: str,
    key: torch.Tensor,
    value: torch.Tensor,
    *,
    clips: tuple[float, float],
    text_hash: str,
    tokens: int,
) -> OscarRecipe:
    """Rotations [L, 1 or H, D, D], no means, fixed clips, no gain."""
    L, H, D = geometry.num_layers, geometry.num_kv_heads, geometry.head_size
    key, value = (part.float().expand(L, H, D, D).contiguous() for part in (key, value))
    one = torch.ones(L, H)
    return OscarRecipe(
        key=key,
        query=key.clone(),
        value=value,
        output=value.mT.contiguous(),
        key_mean=torch.zeros(L, H, D),
        value_mean=torch.zeros(L, H, D),
        key_clip=one * clips[0],
        value_clip=one * clips[1],
        key_gain=one.clone(),
        value_gain=one.clone(),
        metadata=RecipeMetadata(
            model=model,
            geometry=geometry,
            geometry_hash=geometry.hash(),
            method=method,
            centered=False,
            rounds=0,
            text_hash=text_hash,
            tokens=tokens,
        ),
    )
