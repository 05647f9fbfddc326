"""The ``oscar`` command."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from oscar_vllm.calibration.run import DEFAULT_TOKENS

app = typer.Typer(no_args_is_help=True, add_completion=False, help="OSCAR: a 2-bit KV cache for stock vLLM.")
console = Console()
errors = Console(stderr=True)


@app.command()
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
def demo(
    json: Annotated[Path | None, typer.Option(help="Also write the figures as JSON.")] = None,
    new_tokens: Annotated[int, typer.Option(min=16, help="Tokens to generate for the comparison.")] = 64,
) -> None:
    """Calibrate a small real model, answer a long prompt with the stock cache and with OSCAR, compare."""
    from oscar_vllm.demo.run import run_demo

    run_demo(console, json_path=json, new_tokens=new_tokens)


def main() -> None:
    """Entry point: expected errors end in one sentence on stderr and exit status 1."""
    from oscar_vllm.errors import EXPECTED

    try:
        app(standalone_mode=False)
    except typer.Exit as done:
        raise SystemExit(done.exit_code) from None
    except typer.Abort:
        raise SystemExit(130) from None
    except EXPECTED as error:
        errors.print(f"[red]error:[/red] {error}", soft_wrap=True, highlight=False)
        raise SystemExit(1) from None
    except Exception as error:
        # click's usage errors carry their own rendering and exit status.
        if hasattr(error, "show") and hasattr(error, "exit_code"):
            error.show()
            raise SystemExit(error.exit_code) from None
        raise


if __name__ == "__main__":
    main()
