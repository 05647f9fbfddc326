"""A small recipe of numbers that float32 holds exactly, and files of it that are wrong in one thing."""

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from oscar_vllm.calibration.transforms import hadamard
from oscar_vllm.recipe import ModelGeometry, OscarRecipe, RecipeMetadata

GOLDEN = Path(__file__).parent / "data" / "recipe_v1.safetensors"
L, H, D = 2, 2, 4
GEOMETRY = ModelGeometry(
    model_type="llama",
    num_layers=L,
    num_heads=6,
    num_kv_heads=H,
    head_size=D,
    hidden_size=24,
    rope_type="default",
    rope_theta=10000.0,
)


def metadata(**changes: Any) -> RecipeMetadata:
    fields: dict[str, Any] = {
        "model": "org/tiny",
        "geometry": GEOMETRY,
        "geometry_hash": GEOMETRY.hash(),
        "method": "oscar",
        "centered": True,
        "rounds": 3,
        "text_hash": "0123456789abcdef",
        "tokens": 8000,
    }
    return RecipeMetadata(**fields | changes)


def golden_recipe() -> OscarRecipe:
    """Numbers a float32 holds exactly: the same on every machine, and different in every tensor, layer and head."""
    count = torch.arange(L * H * D, dtype=torch.float32).reshape(L, H, D)
    scale = (1.0 + count[..., :1]).unsqueeze(-1).exp2()
    key = hadamard(D).float() * scale  # powers of two, so that the inverse is exact too
    value = hadamard(D).float().flip(-1) / scale
    return OscarRecipe(
        key=key,
        query=key / scale**2,
        value=value,
        output=(value * scale**2).mT.contiguous(),
        key_mean=count / 8,
        value_mean=-count / 4,
        key_clip=1 - count[..., 0] / 64,
        value_clip=1 - count[..., 0] / 32,
        key_gain=1 + count[..., 0] / 64,
        value_gain=1 + count[..., 0] / 32,
        metadata=metadata(),
    )


def write(path: Path, changes: dict[str, torch.Tensor | None] | None = None, /, **header: str | None) -> Path:
    """The golden recipe with tensors or metadata replaced (None: left out), written past every check."""
    recipe = golden_recipe()
    tensors = {name: tensor.clone() for name, tensor in recipe.tensors().items()} | (changes or {})
    strings = recipe.metadata.to_strings() | header
    kept = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    save_file(kept, path, {name: text for name, text in strings.items() if text is not None})
    return path
