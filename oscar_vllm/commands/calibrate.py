"""``oscar calibrate``."""

from pathlib import Path
from typing import Annotated

import typer
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from oscar_vllm.calibration.run import DEFAULT_TOKENS
from oscar_vllm.commands.common import console, one_sentence


@one_sentence
def calibrate(
    model: Annotated[str, typer.Argument(help="Path or Hugging Face id of a model that vLLM serves.")],
    out: Annotated[Path | None, typer.Option(help="Recipe file; left out: the cache, where the server looks.")] = None,
    text: Annotated[Path | None, typer.Option(help="UTF-8 text to calibrate on; left out: a text that ships.")] = None,
    tokens: Annotated[int, typer.Option(min=256, help="Tokens of the text to use.")] = DEFAULT_TOKENS,
    center: Annotated[bool, typer.Option(help="Subtract the mean key and value.")] = True,
    tensor_parallel_size: Annotated[int, typer.Option(min=1)] = 1,
    quantization: Annotated[str | None, typer.Option(help="Weight quantization, as for vLLM.")] = None,
) -> None:
    """Make the recipe that a model is served with."""
    from oscar_vllm.calibration.run import calibrate as run
    from oscar_vllm.calibration.text import default_text, read_text

    source = default_text() if text is None else read_text(text)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("starting vLLM", total=tokens)
        recipe, path = run(
            model,
            text=source,
            tokens=tokens,
            center=center,
            out=out,
            progress=lambda done, _: bar.update(task, completed=done, description="calibrating"),
            tensor_parallel_size=tensor_parallel_size,
            quantization=quantization,
        )
    console.print(f"Recipe {recipe.content_hash()[:12]} of {model}: {path}", soft_wrap=True)
