"""The ``oscar`` command."""

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, ParamSpec

import typer
from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from oscar_vllm.calibration.run import DEFAULT_TOKENS

app = typer.Typer(no_args_is_help=True, add_completion=False, help="OSCAR: a 2-bit KV cache for stock vLLM.")
console = Console()
errors = Console(stderr=True)

P = ParamSpec("P")


def _reason(error: Exception) -> str | None:
    """The one sentence for an error that the user can mend, None for any other."""
    from oscar_vllm.errors import EXPECTED

    if isinstance(error, ValidationError):  # raised by a check while vLLM built its configuration
        problem = error.errors()[0]
        return str(problem.get("ctx", {}).get("error") or problem["msg"])
    if isinstance(error, OSError):  # how transformers says that a model is not there
        return f"{error}"
    return str(error) if isinstance(error, EXPECTED) else None


def one_sentence(command: Callable[P, None]) -> Callable[P, None]:
    """End a command with one sentence on stderr and exit status 1 where the user can mend what went wrong."""

    @functools.wraps(command)
    def wrapped(*args: P.args, **kwargs: P.kwargs) -> None:
        try:
            command(*args, **kwargs)
        except Exception as error:
            reason = _reason(error)
            if reason is None:
                raise
            errors.print(f"[red]error:[/red] {escape(reason)}", soft_wrap=True, highlight=False)
            raise typer.Exit(1) from None

    return wrapped


@app.command()
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


@app.command()
@one_sentence
def demo(
    json: Annotated[Path | None, typer.Option(help="Also write the figures as JSON.")] = None,
    new_tokens: Annotated[int, typer.Option(min=16, help="Tokens to generate for the comparison.")] = 64,
) -> None:
    """Calibrate a small real model, answer a long prompt with the stock cache and with OSCAR, compare."""
    from oscar_vllm.demo.run import run_demo

    run_demo(console, json_path=json, new_tokens=new_tokens)


def main() -> None:
    """Entry point."""
    app()


if __name__ == "__main__":
    main()
