"""Serving side by side: each backend in a process of its own, on the same prompts and the same memory."""

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from oscar_vllm.bench.serve_worker import BACKENDS, ServeSpec
from oscar_vllm.bench.shapes import SHAPES, write_shape
from oscar_vllm.calibration.search import MOMENTS, ROUNDS
from oscar_vllm.geometry import ModelGeometry
from oscar_vllm.recipe import OscarRecipe

ROWS = ((1, 1024), (1, 4096), (1, 32768), (1, 100000), (8, 32768), (64, 8192))
PREFILL = (100000,)
WORKER = "oscar_vllm.bench.serve_worker"
_MARKERS = "osD^v"
Figures = list[dict[str, Any]]


def timing_recipe(model: str, path: Path) -> str:
    """A recipe for random weights that costs what a calibrated one does: full matrices, its quantizer."""
    from transformers import AutoConfig

    recipe = OscarRecipe.hadamard(ModelGeometry.from_hf_config(AutoConfig.from_pretrained(model)), model)
    one = recipe.key_clip * 0 + 1
    metadata = recipe.metadata.model_copy(update={"rounds": ROUNDS, "start": "moments" if MOMENTS else "range"})
    replace(recipe, key_clip=one, value_clip=one, metadata=metadata).save(path)
    return str(path)


class Worker:
    """One backend's process. It starts importing at once and touches the GPU only when :meth:`figures` is called."""

    def __init__(self, spec: ServeSpec, folder: Path) -> None:
        self.backend = spec.backend
        self.out = folder / f"{spec.backend}.jsonl"
        job = folder / f"{spec.backend}.json"
        job.write_text(spec.model_dump_json())
        command = [sys.executable, "-m", WORKER, str(job), str(self.out)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)

    def start(self) -> None:
        """Let it have the GPU."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it failed already, which its status tells
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def figures(self) -> Figures:
        """What it measured once it has ended, and an ``error`` entry where it failed."""
        code = self.process.wait()
        found: Figures = [json.loads(line) for line in self.out.read_text().splitlines()] if self.out.exists() else []
        if code:
            found.append({"backend": self.backend, "kind": "error", "status": code})
        return found

    def stop(self) -> None:
        """End it if it still runs."""
        self.process.kill()
        self.process.wait()


def latency_line(figures: Figures, backend: str) -> tuple[float, float] | None:
    """(a, b) of ``ms per token = a + b * (thousand tokens)`` over one backend's rows of a single request."""
    rows = [f for f in figures if f["backend"] == backend and f["kind"] == "decode" and f["requests"] == 1]
    if len(rows) < 2:
        return None
    slope, start = np.polyfit([f["tokens"] / 1000 for f in rows], [f["ms_per_token"] for f in rows], 1)
    return float(start), float(slope)


def _cells(figures: Figures) -> dict[str, dict[str, str]]:
    """Table rows: figure -> backend -> text."""
    cells: dict[str, dict[str, str]] = {}

    def put(name: str, backend: str, text: str) -> None:
        cells.setdefault(name, {})[backend] = text

    for f in figures:
        backend = f["backend"]
        if f["kind"] == "capacity":
            put("KV tokens", backend, f"{f['kv_tokens']:,}")
        elif f["kind"] == "prefill":
            put(f"prefill of {f['tokens']:,}, s", backend, f"{f['prefill_s']:.2f}")
            put(f"first token on a hit of {f['tokens']:,}, ms", backend, f"{f['hit_ttft_ms']:.0f}")
        elif f["kind"] == "decode":
            put(f"{f['requests']} x {f['tokens']:,}, ms a token", backend, f"{f['ms_per_token']:.2f}")
            put(f"{f['requests']} x {f['tokens']:,}, tokens a second", backend, f"{f['tokens_per_s']:,.0f}")
        elif f["kind"] == "job":
            name = f"job {f['requests']} x {f['tokens']:,} + {f['new_tokens']}, tokens a second"
            put(name, backend, f"{f['tokens_per_s']:,.0f}")
            put(f"{name}, if nothing were computed again", backend, f"{f['tokens_per_s_kept']:,.0f}")
            put(f"{name}: requests at once", backend, str(f["at_once"]))
        elif f["kind"] == "error":
            put("failed with status", backend, str(f["status"]))
    for backend in {f["backend"] for f in figures}:
        if line := latency_line(figures, backend):
            put("one request: ms a token = a + b x (thousand tokens)", backend, f"{line[0]:.2f} + {line[1]:.4f} x")
    return cells


def serve_table(figures: Figures, title: str) -> Table:
    """Rich table, a column a backend."""
    backends = list(dict.fromkeys(f["backend"] for f in figures))
    table = Table(title=title)
    table.add_column("")
    for backend in backends:
        table.add_column(backend, justify="right")
    for name, row in _cells(figures).items():
        table.add_row(name, *(row.get(backend, "-") for backend in backends))
    return table


def latency_plot(figures: Figures, title: str, path: Path) -> None:
    """Milliseconds a token over the context, one line a backend and number of requests (PNG)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt
    from matplotlib.ticker import NullLocator

    figure, axes = plt.subplots(figsize=(8, 5), layout="constrained")
    rows = [f for f in figures if f["kind"] == "decode"]
    counts = sorted({f["requests"] for f in rows})
    for number, backend in enumerate(dict.fromkeys(f["backend"] for f in rows)):
        for requests in counts:
            points = sorted((f["tokens"], f["ms_per_token"]) for f in rows
                            if f["backend"] == backend and f["requests"] == requests)  # fmt: skip
            if points:
                label = f"{backend}, {requests} request" + "s" * (requests > 1)
                marker = _MARKERS[counts.index(requests) % len(_MARKERS)]
                axes.plot(*zip(*points, strict=True), color=f"C{number}", marker=marker, label=label)
    axes.set(xscale="log", yscale="log")
    ticks = [1, 2, 3, 5, 7, 10, 15, 20, 30, 50, 75, 100, 200, 500]
    axes.yaxis.set_minor_locator(NullLocator())
    axes.set_yticks(ticks, [str(tick) for tick in ticks])
    if rows:
        times = [f["ms_per_token"] for f in rows]
        axes.set_ylim(0.8 * min(times), 1.25 * max(times))
    axes.set_xlabel("context, tokens a request")
    axes.set_ylabel("ms a token")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=150)


def run(
    model: str | None,
    *,
    dummy: str | None = None,
    backends: Sequence[str] = ("oscar", "bf16", "fp8", "turboquant"),
    rows: Sequence[tuple[int, int]] = ROWS,
    prefill: Sequence[int] = PREFILL,
    job: tuple[int, int, int] | None = None,
    recipe: str | None = None,
    new_tokens: int = 128,
    chunk: int = 16384,
    engine: dict[str, Any] | None = None,
    json_path: Path | None = None,
    plot_path: Path | None = None,
    console: Console | None = None,
) -> Figures:
    """Bench ``backends`` one after the other; prints the table as it grows, so that a stopped run still tells."""
    console = console or Console()
    figures: Figures = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        if dummy:
            model = write_shape(dummy, folder)
            recipe = recipe or timing_recipe(model, folder / "timing.safetensors")
        assert model is not None
        specs = [
            ServeSpec(
                backend=backend,
                model=model,
                dummy=bool(dummy),
                recipe=recipe,
                rows=list(rows),
                prefill=list(prefill),
                job=job,
                new_tokens=new_tokens,
                chunk=chunk,
                engine=engine or {},
            )
            for backend in backends
        ]
        workers: list[Worker] = []
        try:
            for i, backend in enumerate(backends):
                workers += [
                    Worker(spec, folder) for spec in specs[len(workers) : i + 2]
                ]  # the next one imports meanwhile
                console.print(f"serving {dummy or model} with {backend}")
                workers[i].start()
                figures += workers[i].figures()
                if json_path:
                    json_path.write_text(json.dumps(figures, indent=1))
        finally:
            for worker in workers:
                worker.stop()
    title = f"{dummy or model}{', random weights' if dummy else ''}"
    console.print(serve_table(figures, title))
    if plot_path:
        latency_plot(figures, title, plot_path)
    return figures


def pair(text: str) -> tuple[int, int]:
    """``8x32768`` -> (8, 32768)."""
    requests, _, tokens = text.partition("x")
    return int(requests), int(tokens)


def main() -> None:
    """Command line of ``python -m oscar_vllm.bench.serve``."""
    parser = argparse.ArgumentParser(description="Serving with OSCAR and with vLLM's own caches, side by side.")
    parser.add_argument("model", nargs="?", help="path or Hugging Face id")
    parser.add_argument("--dummy", choices=list(SHAPES), help="this model's shapes with random weights")
    parser.add_argument("--backends", nargs="*", choices=list(BACKENDS), default=["oscar", "bf16", "fp8", "turboquant"])
    parser.add_argument("--rows", nargs="*", type=pair, default=list(ROWS), help="requests x prompt tokens: 8x32768")
    parser.add_argument("--prefill", nargs="*", type=int, default=list(PREFILL), help="prompt lengths to prefill")
    parser.add_argument("--job", nargs=3, type=int, metavar=("REQUESTS", "CONTEXT", "NEW"))
    parser.add_argument("--recipe", help="recipe file; left out: the one calibrated for the model")
    parser.add_argument("--new-tokens", type=int, default=128)
    parser.add_argument("--chunk", type=int, default=16384, help="tokens of a prefill chunk")
    parser.add_argument("--engine", type=json.loads, default={}, help="more engine arguments, as JSON")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--plot", type=Path)
    a = parser.parse_args()
    if (a.model is None) == (a.dummy is None):
        parser.error("name a model or a shape for --dummy, not both")
    run(
        a.model,
        dummy=a.dummy,
        backends=a.backends,
        rows=a.rows,
        prefill=a.prefill,
        job=tuple(a.job) if a.job else None,
        recipe=a.recipe,
        new_tokens=a.new_tokens,
        chunk=a.chunk,
        engine=a.engine,
        json_path=a.json,
        plot_path=a.plot,
    )


if __name__ == "__main__":
    main()
