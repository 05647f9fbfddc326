"""Which recipe serves a model: the configured one, or the one calibrated and cached for it."""

import functools
import hashlib
import re
from pathlib import Path
from typing import Any

from oscar_vllm.config import OscarConfig
from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.paths import cache_dir
from oscar_vllm.recipe import OscarRecipe, RecipeError

HADAMARD = "hadamard"
HUB_FILE = "oscar_recipe.safetensors"


def cached_recipe_path(model: str, geometry: ModelGeometry) -> Path:
    """Where ``oscar calibrate`` puts the recipe of a model: keyed by its name (or real path) and geometry."""
    local = Path(model).expanduser()
    identity = str(local.resolve()) if local.exists() else model
    digest = hashlib.sha256(f"{identity}\n{geometry.hash()}".encode()).hexdigest()[:16]
    name = re.sub(r"[^A-Za-z0-9._-]+", "-", Path(identity).name)
    return cache_dir() / "recipes" / f"{name}-{digest}.safetensors"


def _download(reference: str) -> Path:
    from huggingface_hub import hf_hub_download

    repository, _, revision = reference.partition("@")
    try:
        return Path(hf_hub_download(repository, HUB_FILE, revision=revision or None))
    except Exception as error:  # the hub client raises many kinds; the sentence below names the cause
        raise RecipeError(
            f'oscar recipe "{reference}" is neither a file nor a Hugging Face repository with {HUB_FILE} that can be '
            f"reached ({type(error).__name__}); give the path of a recipe or make one with `oscar calibrate`"
        ) from None


def recipe_path(configured: str | None, model: str, geometry: ModelGeometry) -> Path:
    """The recipe file that serves ``model``.

    Raises:
        RecipeError: there is none; the message gives the command that makes one.
    """
    if configured is None:
        path = cached_recipe_path(model, geometry)
        if not path.is_file():
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
