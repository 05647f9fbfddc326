"""Recipes from published rotations: RotationZoo files, format 1, and per-head ones of the same layout.

Source: https://huggingface.co/Zhongzhu/OSCAR-RotationZoo. A file is ``{"format_version": 1, "objective": ..., "layers":
{layer: {"layer_id": layer, "rotation": [D, D]}}}``; a rotation may also be [H, D, D], one for each KV head. A plain
tensor of all layers, [L, D, D] or [L, H, D, D], is read too.
"""

import pickle
from pathlib import Path
from typing import Any

import torch

from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.recipe import KEY_CLIP, VALUE_CLIP, OscarRecipe, RecipeMetadata
from oscar_vllm.recipe_format import CLIPS, GAINS, MEANS, RecipeError

ORTHOGONALITY = 1e-2
"""Largest entry of RᵀR - I accepted: files may have been stored in bfloat16. Closer ones are made exact."""


def import_recipe(
    keys: Path,
    values: Path,
    geometry: ModelGeometry,
    *,
    model: str,
    key_clip: float = KEY_CLIP,
    value_clip: float = VALUE_CLIP,
) -> OscarRecipe:
    """The recipe of published rotations for keys and values. It has no means: it is marked as not centered.

    Raises:
        RecipeError: a file that cannot be read, or rotations that do not fit the model or are none.
    """
    key, value = read_rotations(keys, geometry), read_rotations(values, geometry)
    shape = (geometry.num_layers, geometry.num_kv_heads)
    one = torch.ones(shape, dtype=torch.float32)
    mean = torch.zeros(*shape, geometry.head_size, dtype=torch.float32)
    metadata = RecipeMetadata(
        model=model,
        geometry=geometry,
        geometry_hash=geometry.hash(),
        method="oscar-imported",
        centered=False,
        rounds=0,
        text_hash="",
        tokens=0,
    )
    return OscarRecipe(
        key=key,
        query=key.clone(),
        value=value,
        output=value.mT.contiguous(),
        **dict.fromkeys(MEANS, mean),
        **dict(zip(CLIPS, (one * key_clip, one * value_clip), strict=True)),
        **dict.fromkeys(GAINS, one),
        metadata=metadata,
    )


def read_rotations(path: Path, geometry: ModelGeometry) -> torch.Tensor:
    """[L, H, D, D] float32, orthogonal within 1e-6.

    Only tensors and plain containers are unpickled (``weights_only=True``): a file cannot run code.

    Raises:
        RecipeError: in one sentence, what is wrong with the file.
    """
    L, H, D = geometry.num_layers, geometry.num_kv_heads, geometry.head_size
    content = _load(path)
    if isinstance(content, torch.Tensor) and len(content.shape) >= 3 and len(content) != L:
        # Before it is taken apart: a tensor may claim any number of layers that all lie in the same memory.
        raise RecipeError(f"{path} has {len(content)} layers and the model has {L}; give the rotations of this model.")
    layers = _layers(content, path)
    missing = sorted(set(range(L)) - set(layers))
    if missing or len(layers) != L:
        what = f"has no layer {missing[0]}" if missing else f"has {len(layers)} layers"
        raise RecipeError(f"{path} {what} and the model has {L} layers; give the rotations of this model.")
    rotations = [_rotation(layers[index], path, index, H, D) for index in range(L)]
    return torch.stack(rotations)


def _load(path: Path) -> Any:
    try:
        return torch.load(path, map_location="cpu", weights_only=True)
    except FileNotFoundError:
        raise RecipeError(f"{path} is not there; give the path of a rotation file.") from None
    except (pickle.UnpicklingError, RuntimeError, EOFError, ValueError, OSError, KeyError) as error:
        reason = str(error).strip().splitlines()[0][:100] if str(error).strip() else type(error).__name__
        raise RecipeError(
            f"{path} is not a file of tensors that can be read safely ({reason}); download it again."
        ) from None


def _layers(content: Any, path: Path) -> dict[int, Any]:
    """Layer number -> rotation, whatever it is."""
    if isinstance(content, torch.Tensor):
        return dict(enumerate(content)) if content.dim() >= 3 else {}
    if not isinstance(content, dict) or not isinstance(content.get("layers"), dict):
        raise RecipeError(f"{path} is not a RotationZoo file (it has no layers); give one of format 1.")
    if content.get("format_version") != 1:
        raise RecipeError(f"{path} has RotationZoo format {content.get('format_version')!r}; only format 1 is read.")
    layers = {}
    for name, entry in content["layers"].items():
        try:
            number = int(entry.get("layer_id", name)) if isinstance(entry, dict) else int(name)
        except (TypeError, ValueError):
            raise RecipeError(f"{path} has a layer called {name!r}; layers are numbers.") from None
        layers[number] = entry.get("rotation") if isinstance(entry, dict) else entry
    return layers


def _rotation(matrix: Any, path: Path, layer: int, heads: int, size: int) -> torch.Tensor:
    """[H, D, D] float32 from [D, D] or [H, D, D], made exactly orthogonal."""
    if not isinstance(matrix, torch.Tensor) or not matrix.is_floating_point():
        raise RecipeError(f"{path} has no matrix of real numbers in layer {layer}; download it again.")
    if tuple(matrix.shape) not in ((size, size), (heads, size, size)):
        raise RecipeError(
            f"{path} has a rotation of shape {list(matrix.shape)} in layer {layer} instead of [{size}, {size}] or "
            f"[{heads}, {size}, {size}]; give the rotations of this model."
        )
    exact = matrix.double().expand(heads, size, size)
    eye = torch.eye(size, dtype=torch.float64)
    error = (exact.mT @ exact - eye).abs().amax((-1, -2))
    if not bool((error <= ORTHOGONALITY).all()):  # NaN compares false
        raise RecipeError(
            f"{path} has a matrix in layer {layer} that is no rotation (RᵀR differs from I by up to "
            f"{error.max().item():.2g}); download it again."
        )
    for _ in range(4):  # Newton towards the nearest orthogonal matrix: the error is squared every time
        exact = 1.5 * exact - 0.5 * exact @ (exact.mT @ exact)
    return exact.float()
