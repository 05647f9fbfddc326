"""``oscar calibrate``."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from oscar_vllm.calibration.candidates import Method
from oscar_vllm.calibration.run import DEFAULT_TOKENS
from oscar_vllm.commands.common import console, one_sentence


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
    text: Annotated[Path | None, typer.Option(help="UTF-8 text to calibrate on; left out: a text that ships.")] = None,
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of the text to use.")] = DEFAULT_TOKENS,
    method: Annotated[Method, typer.Option(help="Transforms; oscar is the published rotation.")] = "geometric-mean",
    center: Annotated[bool, typer.Option(help="Subtract the mean key and value.")] = True,
    search: Annotated[bool, typer.Option(help="Choose the quantizer on held-out tokens; else published clips.")] = True,
    tensor_parallel_size: Annotated[int, typer.Option(min=1)] = 1,
    quantization: Annotated[str | None, typer.Option(help="Weight quantization, as for vLLM.")] = None,
) -> None:
    """Make the recipe that a model is served with."""
    from oscar_vllm.calibration.run import calibrate as run
    from oscar_vllm.calibration.text import default_text, read_text

    source = default_text() if text is None else read_text(text)
    with progress_bar() as progress:
        recipe, path = run(
            model,
            text=source,
            tokens=tokens,
            method=method,
            center=center,
            search=search,
            out=out,
            progress=progress,
            tensor_parallel_size=tensor_parallel_size,
            quantization=quantization,
        )
    console.print(f"Recipe {recipe.content_hash()[:12]} of {model}: {path}", soft_wrap=True)
