"""``oscar bench``: kernels and serving, side by side with what vLLM offers today."""

import json as json_format
from pathlib import Path
from typing import Annotated

import typer

from oscar_vllm.commands.common import console, one_sentence

bench = typer.Typer(no_args_is_help=True, help="Measure speed on this machine's GPU, side by side with BF16 and FP8.")


def _points(text: str) -> list[tuple[int, int]]:
    """``8x32768,1x1024`` -> [(8, 32768), (1, 1024)]."""
    pairs = [part.split("x") for part in text.split(",")]
    if not all(len(pair) == 2 and all(number.isdigit() for number in pair) for pair in pairs):
        raise typer.BadParameter(f'rows are given as BATCHxLENGTH, such as 8x32768,1x1024, not "{text}".')
    return [(int(batch), int(length)) for batch, length in pairs]


@bench.command()
@one_sentence
def kernels(
    model: Annotated[list[str] | None, typer.Option(help="Head layout by its model; repeat for more.")] = None,
    rows: Annotated[str | None, typer.Option(help="Rows BATCHxLENGTH, comma-separated; left out: all.")] = None,
    rivals: Annotated[bool, typer.Option(help="Also time FlashAttention-3 and xformers.")] = True,
    json: Annotated[Path | None, typer.Option(help="Also write the figures as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw the roofline plot (PNG).")] = None,
) -> None:
    """Time one decode step of a layer: rotation, write, windows, history and merge, against FlashAttention-3."""
    import torch

    from oscar_vllm.backend.checks import UnsupportedByOscarError
    from oscar_vllm.bench.kernels import LAYOUTS, POINTS, run

    named = {name: layout for layout in LAYOUTS for name in (layout, *layout.split(", "))}
    unknown = [name for name in model or () if name not in named]
    if unknown:
        raise typer.BadParameter(f'--model takes one of {", ".join(LAYOUTS)}, not "{unknown[0]}".')
    wanted = list(dict.fromkeys(named[name] for name in model or LAYOUTS))
    points = list(POINTS) if rows is None else _points(rows)
    if not torch.cuda.is_available():
        raise UnsupportedByOscarError("The kernels are timed on an NVIDIA GPU, and this machine has none.")
    run(json, plot, models=wanted, points=points, rivals=rivals, console=console)


@bench.command()
@one_sentence
def serve(
    model: Annotated[str | None, typer.Argument(help="Path or Hugging Face id of a model.")] = None,
    dummy: Annotated[str | None, typer.Option(help="This model's shapes with random weights: qwen3-8b, tiny.")] = None,
    backends: Annotated[str, typer.Option(help="Backends, comma-separated.")] = "oscar,bf16,fp8,turboquant",
    rows: Annotated[str | None, typer.Option(help="Rows REQUESTSxTOKENS, comma-separated.")] = None,
    prefill: Annotated[str | None, typer.Option(help="Prompt lengths to prefill, comma-separated.")] = None,
    job: Annotated[
        tuple[int, int, int] | None,
        typer.Option(help="Throughput job: requests, cached context and new tokens of each."),
    ] = None,
    recipe: Annotated[Path | None, typer.Option(help="Recipe; left out: the one calibrated for the model.")] = None,
    new_tokens: Annotated[int, typer.Option(min=1, help="Tokens that each request generates.")] = 128,
    chunk: Annotated[int, typer.Option(min=1, help="Tokens of a prefill chunk.")] = 16384,
    engine_options: Annotated[str, typer.Option(help="JSON object of further options for vllm.LLM.")] = "{}",
    json: Annotated[Path | None, typer.Option(help="Also write the figures as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option(help="Also draw latency over context (PNG).")] = None,
) -> None:
    """Serve the same prompts with OSCAR and with vLLM's own caches: latency, throughput, capacity."""
    from oscar_vllm.bench.serve import PREFILL, ROWS, run
    from oscar_vllm.bench.serve_worker import BACKENDS
    from oscar_vllm.bench.shapes import SHAPES

    if (model is None) == (dummy is None):
        raise typer.BadParameter("Name a model, or a shape with --dummy, not both.")
    if dummy is not None and dummy not in SHAPES:
        raise typer.BadParameter(f'--dummy takes {", ".join(SHAPES)}, not "{dummy}".')
    names = backends.split(",")
    unknown = [name for name in names if name not in BACKENDS]
    if unknown:
        raise typer.BadParameter(f'--backends takes {", ".join(BACKENDS)}, not "{unknown[0]}".')
    try:
        lengths = list(PREFILL) if prefill is None else [int(part) for part in prefill.split(",") if part]
        options = dict(json_format.loads(engine_options))
    except (ValueError, TypeError):
        raise typer.BadParameter("--prefill takes numbers and --engine-options a JSON object.") from None
    run(
        model,
        dummy=dummy,
        backends=names,
        rows=list(ROWS) if rows is None else _points(rows),
        prefill=lengths,
        job=job,
        recipe=None if recipe is None else str(recipe),
        new_tokens=new_tokens,
        chunk=chunk,
        engine=options,
        json_path=json,
        plot_path=plot,
        console=console,
    )
