"""Which recipe serves a model: the configured one, else the one cached for it, else a published one."""

import functools
import hashlib
import re
from pathlib import Path
from typing import Any

from oscar_vllm.config import OscarConfig
from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.hub import HubError, download
from oscar_vllm.paths import cache_dir
from oscar_vllm.recipe import OscarRecipe, RecipeError
from oscar_vllm.recipe_published import import_published

HADAMARD = "hadamard"
HUB_FILE = "oscar_recipe.safetensors"
WEIGHTS = (".safetensors", ".bin", ".pt", ".pth", ".gguf")


def cached_recipe_path(model: str, geometry: ModelGeometry) -> Path:
    """Where ``oscar calibrate`` puts the recipe of a model: keyed by its geometry and its weights (or hub id)."""
    local = Path(model).expanduser()
    identity = fingerprint(local) if local.is_dir() else model
    digest = hashlib.sha256(f"{identity}\n{geometry.hash()}".encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", (local.resolve() if local.exists() else local).name)
    return cache_dir() / "recipes" / f"{name}-{digest}.safetensors"


def fingerprint(folder: Path) -> str:
    """A hash of a model's folder that a copy keeps and a fine-tune changes, without reading all of its weights.

    Over the configuration, and of every weight file its name, its size and pieces of 64 KiB at eight places.
    """
    digest = hashlib.sha256()
    config = folder / "config.json"
    if config.is_file():
        digest.update(config.read_bytes())
    for file in sorted(path for path in folder.iterdir() if path.suffix in WEIGHTS):
        size = file.stat().st_size
        digest.update(f"{file.name} {size}".encode())
        with file.open("rb") as stream:
            for place in range(8):
                stream.seek(size * place // 8)
                digest.update(stream.read(1 << 16))
    return digest.hexdigest()


def _download(reference: str) -> Path:
    repository, _, revision = reference.partition("@")
    try:
        return download(repository, HUB_FILE, revision)
    except HubError as error:
        raise RecipeError(
            f'oscar recipe "{reference}" is not a file here, and {str(error).rstrip(".")}, or make a recipe with '
            "`oscar calibrate`"
        ) from None


def recipe_path(configured: str | None, model: str, geometry: ModelGeometry) -> Path:
    """The recipe file that serves ``model``.

    Raises:
        RecipeError: there is none; the message gives the command that makes one.
    """
    if configured is None:
        path = cached_recipe_path(model, geometry)
        if not path.is_file() and not import_published(model, geometry, path):
            raise RecipeError(
                f"OSCAR has no recipe for {model}; make one with `oscar calibrate {model}`, or name one with "
                '--additional-config \'{"oscar": {"recipe": PATH}}\''
            )
        return path
    path = Path(configured).expanduser()
    if path.is_file():
        return path
    if re.fullmatch(r"[\w.-]+/[\w.-]+(@[\w./-]+)?", configured) and not configured.endswith(".safetensors"):
        return _download(configured)
    raise RecipeError(
        f'oscar recipe "{configured}" is not a file; make it with `oscar calibrate {model} --out {configured}`'
    )


@functools.lru_cache(maxsize=1)
def _load(path: Path, modified: int, geometry_hash: str) -> OscarRecipe:
    del modified, geometry_hash  # part of the key
    return OscarRecipe.load(path)


def load_recipe(vllm_config: Any) -> OscarRecipe:
    """The recipe of the model that ``vllm_config`` serves, checked against its geometry.

    Raises:
        RecipeError: no recipe, a damaged one, or one of another model.
    """
    config = OscarConfig.from_additional_config(vllm_config.additional_config)
    model = vllm_config.model_config
    geometry = ModelGeometry.from_hf_config(model.hf_text_config)
    if config.recipe == HADAMARD:
        return OscarRecipe.hadamard(geometry)
    path = recipe_path(config.recipe, model.model, geometry)
    recipe = _load(path, path.stat().st_mtime_ns, geometry.hash())
    recipe.check_geometry(geometry)
    return recipe
