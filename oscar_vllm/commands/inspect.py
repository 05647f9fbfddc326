"""``oscar inspect``."""

from pathlib import Path
from typing import Annotated

import typer

from oscar_vllm.commands.common import console, one_sentence


@one_sentence
def inspect(
    recipe: Annotated[Path, typer.Argument(help="A recipe file.")],
    plot: Annotated[Path | None, typer.Option(help="Also draw it as a PNG.")] = None,
) -> None:
    """Show what a recipe holds, layer by layer."""
    from oscar_vllm.recipe import OscarRecipe
    from oscar_vllm.recipe_report import draw, report

    loaded = OscarRecipe.load(recipe)
    report(loaded, console)
    if plot is not None:
        draw(loaded, plot)
        console.print(f"Plot: {plot}", soft_wrap=True)
