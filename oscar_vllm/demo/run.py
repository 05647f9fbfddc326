"""``oscar demo``: the same long prompt through the stock KV cache and through OSCAR, side by side."""

import json
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from oscar_vllm.cache.capacity import tokens_that_fit
from oscar_vllm.cache.layout import bits_per_element
from oscar_vllm.calibration.run import DEFAULT_TOKENS, calibrate
from oscar_vllm.calibration.text import default_text
from oscar_vllm.config import OscarConfig
from oscar_vllm.demo.model import ensure_demo_model
from oscar_vllm.demo.prompt import ANSWER, long_prompt
from oscar_vllm.engine import cpu_options, engine

CONTEXT = 8192
"""The model's context: capacity is counted in requests of this many tokens."""
CHUNK = 512


@dataclass(frozen=True)
class Side:
    """One backend's figures."""

    answer: str
    prefill_seconds: float
    tokens_per_second: float
    kv_tokens: int
    bits_per_element: float
    token_ids: list[int]


def _serve(llm: Any, prompt: list[int], new_tokens: int) -> tuple[str, float, float, list[int]]:
    """Answer, seconds of the cold prefill, decoded tokens per second, and ``new_tokens`` greedy tokens."""
    from vllm import SamplingParams

    def generate(tokens: int, ignore_eos: bool) -> tuple[Any, float]:
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=ignore_eos)
        start = time.perf_counter()
        output = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)[0].outputs[0]
        return output, time.perf_counter() - start

    _, cold = generate(1, True)
    answer, _ = generate(new_tokens, False)
    _, first = generate(1, True)
    forced, whole = generate(new_tokens, True)
    return answer.text.strip(), cold, (new_tokens - 1) / (whole - first), list(forced.token_ids)


def _agreement(llm: Any, prompt: list[int], continuation: list[int]) -> float:
    """Share of ``continuation`` that is also this backend's greedy choice, given the same tokens before it."""
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=0)
    request = {"prompt_token_ids": [*prompt, *continuation]}
    logprobs = llm.generate([request], sampling, use_tqdm=False)[0].prompt_logprobs
    ranks = [logprobs[len(prompt) + i][token].rank for i, token in enumerate(continuation)]
    return float(sum(rank == 1 for rank in ranks) / len(ranks))


def _blocks(llm: Any) -> int:
    blocks = llm.llm_engine.vllm_config.cache_config.num_gpu_blocks
    assert blocks, "vLLM did not report its block count"
    return int(blocks)


def run_demo(console: Console, *, json_path: Path | None, new_tokens: int) -> dict[str, Any]:
    """Run the demo, print its tables, and return (and write, if asked) its figures."""
    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    config = OscarConfig()
    options: dict[str, Any] = {"max_model_len": CONTEXT, "max_num_batched_tokens": CHUNK, "max_num_seqs": 8}
    # Eager: what the compiler saves here is less than what it costs, and it needs a C++ compiler.
    options |= {"enforce_eager": True, **cpu_options()}
    with Progress(*columns, console=console) as bar:
        task = bar.add_task("fetching SmolLM2-135M-Instruct", total=100)
        model = str(ensure_demo_model(lambda step: bar.update(task, description=step)))
        bar.update(task, completed=10, description="calibrating: starting vLLM")
        recipe, path = calibrate(
            model,
            text=default_text(),
            progress=lambda step, done, total: bar.update(
                task,
                completed=(30 + 10 * done / total) if step == "searching" else 10 + 20 * done / total,
                description=step,
            ),
        )
        bar.update(task, completed=40, description="stock backend: starting vLLM")
        with engine(model, **options) as llm:
            prompt = long_prompt(llm.get_tokenizer())
            bar.update(task, completed=50, description=f"stock backend: {len(prompt)} tokens")
            answer, cold, speed, tokens = _serve(llm, prompt, new_tokens)
            block_size = llm.llm_engine.vllm_config.cache_config.block_size
            stock = Side(answer, cold, speed, (_blocks(llm) - 1) * block_size, 16.0, tokens)
        bar.update(task, completed=70, description="OSCAR: starting vLLM")
        settings: dict[str, Any] = {"attention_backend": "OSCAR", "additional_config": {"oscar": {"recipe": str(path)}}}
        with engine(model, **options, **settings) as llm:
            bar.update(task, completed=80, description=f"OSCAR: {len(prompt)} tokens")
            answer, cold, speed, tokens = _serve(llm, prompt, new_tokens)
            capacity = tokens_that_fit(_blocks(llm), CONTEXT, config.sink, config.recent)
            bits = bits_per_element(recipe.geometry.head_size, CONTEXT, config.sink + config.recent)
            oscar = Side(answer, cold, speed, capacity, bits, tokens)
            agreement = _agreement(llm, prompt, stock.token_ids)
        bar.update(task, completed=100, description="done")
    figures = {
        "model": "SmolLM2-135M-Instruct",
        "prompt_tokens": len(prompt),
        "calibration_tokens": DEFAULT_TOKENS,
        "recipe": {"path": str(path), "hash": recipe.content_hash()},
        "request_tokens": CONTEXT,
        "stock": asdict(stock),
        "oscar": asdict(oscar),
        "kv_tokens_ratio": oscar.kv_tokens / stock.kv_tokens,
        "greedy_agreement": agreement,
        "right": {name: ANSWER in side.answer for name, side in (("stock", stock), ("oscar", oscar))},
    }
    _print(console, figures)
    if json_path is not None:
        json_path.write_text(json.dumps(figures, indent=2) + "\n")
    return figures


def _print(console: Console, figures: dict[str, Any]) -> None:
    stock, oscar = figures["stock"], figures["oscar"]
    table = Table(title=f"{figures['model']}, a prompt of {figures['prompt_tokens']:,} tokens", title_justify="left")
    table.add_column("")
    table.add_column("stock BF16 cache", justify="right")
    table.add_column("OSCAR 2-bit cache", justify="right")
    for name in ("stock", "oscar"):
        mark = "[green]right[/green]" if figures["right"][name] else "[red]wrong[/red]"
        figures[name]["shown"] = f"{figures[name]['answer']} ({mark})"
    table.add_row("answer", stock.pop("shown"), oscar.pop("shown"))
    for label, key, form in (
        ("prefill, seconds", "prefill_seconds", "{:.2f}"),
        ("decode, tokens per second", "tokens_per_second", "{:.1f}"),
        (f"KV tokens in the same memory, requests of {figures['request_tokens']:,}", "kv_tokens", "{:,}"),
        (f"bits per cached element at {figures['request_tokens']:,} tokens", "bits_per_element", "{:.2f}"),
    ):
        table.add_row(label, form.format(stock[key]), form.format(oscar[key]))
    console.print(table)
    console.print(
        f"KV tokens: {figures['kv_tokens_ratio']:.1f} times the stock cache's. Greedy tokens that agree: "
        f"{figures['greedy_agreement']:.0%} of {len(stock['token_ids'])}."
    )
