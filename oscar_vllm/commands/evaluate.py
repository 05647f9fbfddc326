"""``oscar eval``."""

import json as json_format
from pathlib import Path
from typing import Annotated, Any

import typer

from oscar_vllm.commands.common import console, one_sentence

_TASKS = "bf16,quarot,oscar,ours"


@one_sentence
def evaluate(
    model: Annotated[str, typer.Argument(help="Path or Hugging Face id of a model that vLLM serves.")],
    methods: Annotated[
        str | None, typer.Option(help="KV caches to compare with BF16, comma-separated; left out: all that run here.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=0, help="Positions to compare, at least; 0: none.")] = 8000,
    length: Annotated[int, typer.Option(min=400, help="Tokens of one text.")] = 2400,
    recipe: Annotated[Path | None, typer.Option(help="Recipe to evaluate; left out: the cached one.")] = None,
    needle: Annotated[bool, typer.Option("--needle", help="Also look for needles in haystacks.")] = False,
    needle_lengths: Annotated[
        str | None, typer.Option(help="Prompt tokens, comma-separated; left out: up to the model's context.")
    ] = None,
    needle_repeats: Annotated[int, typer.Option(min=1, help="Prompts for each length and depth.")] = 1,
    humaneval: Annotated[
        bool, typer.Option("--humaneval", help="Also score HumanEval: RUNS GENERATED CODE in a sandbox.")
    ] = False,
    problems: Annotated[int, typer.Option(min=1, max=164, help="The first so many of HumanEval's problems.")] = 164,
    task_methods: Annotated[str, typer.Option(help="KV caches that look for needles and solve HumanEval.")] = _TASKS,
    json: Annotated[Path | None, typer.Option(help="Also write the figures as JSON.")] = None,
    plots: Annotated[Path | None, typer.Option(help="Also draw PNG files into this folder.")] = None,
    tensor_parallel_size: Annotated[int, typer.Option(min=1)] = 1,
    quantization: Annotated[str | None, typer.Option(help="Weight quantization, as for vLLM.")] = None,
    engine_options: Annotated[str, typer.Option(help="JSON object of further options for vllm.LLM.")] = "{}",
) -> None:
    """Measure what a KV cache costs: distance to BF16, needles found, problems solved."""
    from oscar_vllm.evaluation.methods import EvaluationError, choose
    from oscar_vllm.evaluation.plan import Plan
    from oscar_vllm.evaluation.report import print_report
    from oscar_vllm.evaluation.run import evaluate as run

    try:
        lengths = None if needle_lengths is None else tuple(int(part) for part in needle_lengths.split(","))
    except ValueError:
        raise EvaluationError(f'--needle-lengths takes numbers such as 1024,4096, not "{needle_lengths}".') from None
    try:
        options = dict(json_format.loads(engine_options))
    except (ValueError, TypeError):
        raise EvaluationError(f"--engine-options takes a JSON object, not {engine_options}.") from None

    def keep(figures: dict[str, Any]) -> None:
        if json is not None:
            json.parent.mkdir(parents=True, exist_ok=True)
            json.write_text(json_format.dumps(figures, indent=2) + "\n")

    plan = Plan(
        model=model,
        methods=choose(methods),
        tokens=tokens,
        length=length,
        needle=needle,
        needle_lengths=lengths,
        needle_repeats=needle_repeats,
        problems=problems if humaneval else 0,
        tasks=choose(task_methods) if needle or humaneval else [],
        recipe=recipe,
        engine_options={"tensor_parallel_size": tensor_parallel_size, "quantization": quantization, **options},
    )
    with console.status("starting") as status:
        said = ""

        def say(step: str) -> None:
            nonlocal said
            if console.is_terminal:
                status.update(step)
            elif step != said:
                console.print(step, soft_wrap=True)
            said = step

        figures = run(plan, say, keep)
    print_report(console, figures)
    if plots is not None:
        from oscar_vllm.evaluation.plots import draw

        for file in draw(figures, plots):
            console.print(f"Drawn: {file}", soft_wrap=True)
