"""The recipe files that the served INT2 methods of one evaluation use, each made once."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

from oscar_vllm.backend.recipes import HADAMARD, cached_recipe_path
from oscar_vllm.calibration.collect import collect
from oscar_vllm.calibration.run import DEFAULT_TOKENS, calibrate
from oscar_vllm.calibration.text import default_text, held_out_text, text_hash
from oscar_vllm.evaluation.baselines import naive_recipe, published_recipe
from oscar_vllm.evaluation.methods import OURS, EvaluationError
from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.recipe import OscarRecipe


def prepare_recipes(
    model: str,
    geometry: ModelGeometry,
    names: set[str],
    folder: Path,
    *,
    ours: Path | None = None,
    say: Callable[[str], None],
    **options: Any,
) -> dict[str, str]:
    """What the OSCAR backend is told for each baseline: a recipe's path, or "hadamard".

    Args:
        names: of "naive", "quarot", "oscar", "ours".
        folder: where recipes are written that are of no use later.
        ours: the recipe to evaluate; None: the one cached for this model, made if there is none.
        say: called with what is being done.
        options: for ``vllm.LLM`` while calibrating.

    Raises:
        EvaluationError: the recipe was calibrated on the text that it would be tested on.
    """
    recipes = {"quarot": HADAMARD}
    if OURS in names:
        recipes[OURS] = str(_ours(model, geometry, ours, say, options))
        if OscarRecipe.load(recipes[OURS]).metadata.text_hash == text_hash(held_out_text()):
            raise EvaluationError(
                f"{recipes[OURS]} was calibrated on the text of the evaluation; calibrate on another text."
            )
    if "naive" in names:
        recipes["naive"] = str(folder / "naive.safetensors")
        naive_recipe(geometry, model).save(recipes["naive"])
    if "oscar" in names:
        say("calibrating the published method")
        recipes["oscar"] = str(folder / "oscar.safetensors")
        text = default_text()
        collected = collect(model, text=text, tokens=DEFAULT_TOKENS, sample=False, **options)
        statistics = [layer.statistics for layer in collected.layers]
        published = published_recipe(
            statistics, geometry, model=model, text_hash=text_hash(text), tokens=DEFAULT_TOKENS
        )
        published.save(recipes["oscar"])
    return {name: recipe for name, recipe in recipes.items() if name in names}


def _ours(
    model: str, geometry: ModelGeometry, ours: Path | None, say: Callable[[str], None], options: dict[str, Any]
) -> Path:
    path = ours or cached_recipe_path(model, geometry)
    if ours is None and not path.is_file():
        _, path = calibrate(model, text=default_text(), progress=lambda step, *_: say(step), **options)
    return path
