"""``oscar import``."""

from pathlib import Path
from typing import Annotated

import typer

from oscar_vllm.commands.common import console, one_sentence
from oscar_vllm.recipe import KEY_CLIP, VALUE_CLIP

_SOURCE = "a path, or ORG/NAME[@REVISION]:FILE on the Hugging Face hub."


@one_sentence
def import_recipe(
    k: Annotated[str, typer.Option(help=f"Key rotations: {_SOURCE}")],
    v: Annotated[str, typer.Option(help=f"Value rotations: {_SOURCE}")],
    model: Annotated[str, typer.Option(help="Path or Hugging Face id of the model they were made for.")],
    out: Annotated[Path | None, typer.Option(help="Recipe file; left out: the cache, where the server looks.")] = None,
    key_clip: Annotated[float, typer.Option(min=0.5, max=1.0, help="Clip ratio of keys.")] = KEY_CLIP,
    value_clip: Annotated[float, typer.Option(min=0.5, max=1.0, help="Clip ratio of values.")] = VALUE_CLIP,
) -> None:
    """Make a recipe from published rotations (RotationZoo, format 1)."""
    from oscar_vllm.backend.recipes import cached_recipe_path
    from oscar_vllm.calibration.collect import model_geometry
    from oscar_vllm.hub import fetch
    from oscar_vllm.recipe_import import import_recipe as run

    geometry = model_geometry(model)
    recipe = run(fetch(k), fetch(v), geometry, model=model, key_clip=key_clip, value_clip=value_clip)
    path = cached_recipe_path(model, geometry) if out is None else out
    recipe.save(path)
    console.print(f"Recipe {recipe.content_hash()[:12]} of {model}: {path}", soft_wrap=True)
    console.print(
        f"It has no means, so keys and values are stored uncentered, which costs accuracy; `oscar calibrate {model} "
        f"--means-only --recipe {path}` adds them.",
        soft_wrap=True,
    )
