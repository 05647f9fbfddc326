"""Calibration from end to end: a text in, a recipe on disk."""

import logging
from pathlib import Path
from typing import Any

import torch

from oscar_vllm.backend.recipes import cached_recipe_path
from oscar_vllm.calibration.build import build_recipe
from oscar_vllm.calibration.collect import CalibrationError, Progress, collect, model_geometry
from oscar_vllm.calibration.methods import Method
from oscar_vllm.calibration.text import text_hash
from oscar_vllm.recipe import PROMPT_TOKENS, OscarRecipe
from oscar_vllm.recipe_format import MEANS

__all__ = ["DEFAULT_TOKENS", "CalibrationError", "add_means", "calibrate"]

DEFAULT_TOKENS = 8192
logger = logging.getLogger("vllm.oscar")


def calibrate(
    model: str,
    *,
    text: str,
    tokens: int = DEFAULT_TOKENS,
    method: Method = "geometric-mean",
    center: bool = True,
    search: bool = True,
    out: Path | None = None,
    resume: Path | None = None,
    progress: Progress | None = None,
    **engine_options: Any,
) -> tuple[OscarRecipe, Path]:
    """Make a recipe for ``model`` and save it.

    Args:
        model: a path or Hugging Face id that vLLM serves with full attention.
        text: calibration text; its first ``tokens`` tokens are used, and with ``search`` up to 4,096 more.
        tokens: how many tokens to calibrate on.
        method: which transforms; "oscar" is the published rotation per KV head.
        center: subtract the calibrated means of keys and values.
        search: choose transform, clip and gain per head on held-out tokens; else the published clips.
        out: where to save; None: the cache, where the server finds it by itself.
        resume: a folder to keep the sums in and to go on from.
        progress: called with (what is being done, how much is done, how much in all).
        engine_options: passed to ``vllm.LLM`` (quantization, tensor_parallel_size, ...).

    Returns:
        The recipe and the file it was saved to.

    Raises:
        CalibrationError: the text is too short.
        CheckpointError: ``resume`` holds another calibration.
        UnsupportedByOscarError: the model is one that OSCAR does not serve.
    """
    collected = collect(
        model, text=text, tokens=tokens, sample=search, resume=resume, progress=progress, **engine_options
    )
    unknown = sum(layer.rotary is None for layer in collected.layers)
    if search and unknown and collected.geometry.rope_theta > 0:
        logger.warning(
            "How keys turn with their position is not known of %d of %d layers; check with `oscar eval --needle` that "
            "the recipe holds far beyond the %d positions of a calibration prompt.",
            unknown,
            len(collected.layers),
            PROMPT_TOKENS,
        )
    recipe = build_recipe(
        collected.layers,
        collected.geometry,
        model=model,
        text_hash=text_hash(text),
        tokens=tokens,
        method=method,
        center=center,
        device="cuda" if torch.cuda.is_available() else "cpu",
        progress=None if progress is None else lambda done, layers: progress("searching", done, layers),
    )
    path = cached_recipe_path(model, collected.geometry) if out is None else out
    recipe.save(path)
    return recipe, path


def add_means(
    recipe: OscarRecipe,
    model: str,
    *,
    text: str,
    tokens: int = DEFAULT_TOKENS,
    out: Path,
    progress: Progress | None = None,
    **engine_options: Any,
) -> OscarRecipe:
    """Calibrate only the means of keys and values, and put them into a recipe that has none (an imported one).

    Raises:
        CalibrationError: the text is too short.
        RecipeError: the recipe is of another model.
    """
    recipe.check_geometry(model_geometry(model))
    collected = collect(model, text=text, tokens=tokens, sample=False, progress=progress, **engine_options)
    means = {
        name: torch.stack([getattr(layer.statistics, name) for layer in collected.layers]).float() for name in MEANS
    }
    update = {"centered": True, "tokens": tokens, "text_hash": text_hash(text)}
    centered = OscarRecipe(**recipe.tensors() | means, metadata=recipe.metadata.model_copy(update=update))
    centered.save(out)
    return centered
