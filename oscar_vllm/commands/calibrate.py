"""``oscar calibrate``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from oscar_vllm.calibration.methods import Method
from oscar_vllm.calibration.run import DEFAULT_TOKENS
from oscar_vllm.calibration.text_source import read_source
from oscar_vllm.commands.common import console, one_sentence

TEXT_HELP = "A UTF-8 file, a folder of them, or hf:DATASET[@REVISION][:SPLIT]; left out: a text that ships."

RESUME_HELP = "Folder to keep the sums in, and to go on from: after an interruption, or with more --tokens."


@contextmanager
def progress_bar() -> Iterator[Callable[[str, int, int], None]]:
    """A bar on the terminal, and the function that moves it: (what is being done, how much is done, of how much)."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting", total=None)
        yield lambda step, done, total: bar.update(task, description=step, completed=done, total=total)


@one_sentence
def calibrate(
    model: Annotated[str, typer.Argument(help="Path or Hugging Face id of a model that vLLM serves.")],
    out: Annotated[Path | None, typer.Option(help="Recipe file; left out: the cache, where the server looks.")] = None,
    text: Annotated[str | None, typer.Option(help=TEXT_HELP)] = None,
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of the text to use.")] = DEFAULT_TOKENS,
    method: Annotated[Method, typer.Option(help="Transforms; oscar is the published rotation.")] = "geometric-mean",
    center: Annotated[bool, typer.Option(help="Subtract the mean key and value.")] = True,
    search: Annotated[bool, typer.Option(help="Choose the quantizer on held-out tokens; else published clips.")] = True,
    means_only: Annotated[bool, typer.Option(help="Add means to --recipe and change nothing else.")] = False,
    recipe: Annotated[Path | None, typer.Option(help="Recipe for --means-only; left out: the cached one.")] = None,
    resume: Annotated[Path | None, typer.Option(help=RESUME_HELP)] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1)] = 1,
    quantization: Annotated[str | None, typer.Option(help="Weight quantization, as for vLLM.")] = None,
) -> None:
    """Make the recipe that a model is served with."""
    from oscar_vllm.backend.recipes import cached_recipe_path
    from oscar_vllm.calibration import run
    from oscar_vllm.calibration.collect import model_geometry
    from oscar_vllm.recipe import OscarRecipe

    if recipe is not None and not means_only:
        raise typer.BadParameter("--recipe is what --means-only adds means to; to write a recipe use --out.")
    if resume is not None and means_only:
        raise typer.BadParameter("--resume keeps the sums of a whole calibration; leave it out with --means-only.")
    source = read_source(text)
    options: dict[str, Any] = {"tensor_parallel_size": tensor_parallel_size, "quantization": quantization}
    with progress_bar() as progress:
        options |= {"text": source, "tokens": tokens, "progress": progress}
        if means_only:
            path = recipe or cached_recipe_path(model, model_geometry(model))
            made = run.add_means(OscarRecipe.load(path), model, out=out or path, **options)
            path = out or path
        else:
            made, path = run.calibrate(
                model, method=method, center=center, search=search, out=out, resume=resume, **options
            )
    console.print(f"Recipe {made.content_hash()[:12]} of {model}: {path}", soft_wrap=True)
