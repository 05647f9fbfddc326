"""``oscar bench kernels``: one decode step of a layer with OSCAR's cache, side by side with what vLLM serves today.

Each row times the whole operation as a CUDA graph over buffers larger than the L2 cache: for OSCAR the write of the new
token (transform, quantizer, windows), the query transform, attention over windows and history, the merge and the map
back; for FlashAttention-3 its cache write and attention. The roofline of a row is its K and V bytes at the bandwidth
that PyTorch's copy reaches in the same run.

    oscar bench kernels --json bench.json --plot bench.png
"""

import json
import platform
from collections.abc import Callable, Iterable
from copy import deepcopy
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from oscar_vllm.bench.contenders import (
    Calls,
    Shape,
    UnavailableError,
    flash,
    oscar,
    random_recipe,
    xformers_split_k,
)
from oscar_vllm.bench.timing import copy_bandwidth, graph_microseconds, sets_for
from oscar_vllm.cache.layout import PAGE_TOKENS, WINDOW_TOKENS, PageLayout
from oscar_vllm.calibration.search import MOMENTS, ROUNDS

LAYOUTS = {
    "Qwen3-8B, Llama-3.1-8B": (32, 8, 128),
    "Qwen3-32B": (64, 8, 128),
    "Llama-70B at TP8": (8, 1, 128),
    "Qwen2.5-1.5B": (12, 2, 128),
    "SmolLM2-135M": (9, 3, 64),
}
"""Query heads, KV heads and head size of the models whose names head the rows."""
K = 1024
POINTS = (
    (1, K), (1, 4 * K), (1, 32 * K), (1, 128 * K), (1, 256 * K), (8, K), (8, 8 * K), (8, 32 * K), (8, 128 * K),
    (32, 8 * K), (32, 32 * K), (128, K), (128, 8 * K),
)  # fmt: skip
"""(batch, length) of the decode rows."""
WRITES = (1, 8, 64, K, 16 * K)
"""New tokens of the write rows."""
QUANTIZERS = ((0, False, 1.0), (ROUNDS, MOMENTS, 1.0), (4, False, 1.0), (0, False, 0.92))
"""(refit rounds, whether they start from the row's moments, clip) ; the second is what calibration chooses."""
_TABLE_WIDTH = 140
"""Wider than a pipe's 80 columns, at which no figure would be left whole."""


@dataclass
class DecodeRow:
    """Times in microseconds; None where a contender could not run, with the reason in ``notes``."""

    model: str
    query_heads: int
    heads: int
    dim: int
    batch: int
    length: int
    oscar: float | None
    flash_bf16: float | None
    flash_fp8: float | None
    xformers: float | None
    oscar_bytes: int
    flash_bytes: int
    oscar_roofline: float
    flash_roofline: float
    notes: list[str]

    def ratio(self, other: float | None) -> float | None:
        """How many times faster than ``other`` OSCAR is."""
        return other / self.oscar if other and self.oscar else None


@dataclass
class WriteRow:
    """The write kernel alone; bytes are the rows read and the page bytes written (no window)."""

    tokens: int
    heads: int
    dim: int
    quantizer: str
    microseconds: float
    bytes: int
    roofline: float


def _measure(make: Callable[[], Calls], notes: list[str]) -> float | None:
    try:
        return graph_microseconds(make())
    except UnavailableError as error:
        notes.append(str(error))
        return None
    finally:
        torch.cuda.empty_cache()


def decode_row(model: str, batch: int, length: int, bandwidth: float, rivals: bool) -> DecodeRow:
    """Measure every contender on one shape."""
    shape = Shape(*LAYOUTS[model], batch, length)
    notes: list[str] = []
    ours = _measure(lambda: oscar(shape), notes)
    bf16 = fp8 = xformers = None
    if rivals:
        bf16 = _measure(lambda: flash(shape, False), notes)
        fp8 = _measure(lambda: flash(shape, True), notes)
        xformers = _measure(lambda: xformers_split_k(shape), notes)
    return DecodeRow(
        model,
        *LAYOUTS[model],
        batch,
        length,
        oscar=ours,
        flash_bf16=bf16,
        flash_fp8=fp8,
        xformers=xformers,
        oscar_bytes=shape.oscar_bytes,
        flash_bytes=shape.flash_bytes,
        oscar_roofline=shape.oscar_bytes / bandwidth * 1e6,
        flash_roofline=shape.flash_bytes / bandwidth * 1e6,
        notes=sorted({*notes}),
    )


def write_row(tokens: int, rounds: int, moments: bool, clip: float, bandwidth: float) -> WriteRow:
    """Time the write of ``tokens`` new tokens, K and V, 8 KV heads of 128 channels."""
    from oscar_vllm.kernels.write.triton import write_triton

    heads, dim = 8, 128
    layout = PageLayout(dim)
    moved = tokens * heads * (4 * dim + layout.token_bytes)
    common = random_recipe(heads, dim, rounds, clip, moments)

    def one() -> Callable[[], None]:
        recipe = deepcopy(common)  # as every layer has matrices of its own
        key, value = torch.randn(2, tokens, heads, dim, device="cuda").bfloat16()
        pages = -(-tokens // PAGE_TOKENS) + 1
        history = torch.empty(pages, heads, PAGE_TOKENS, layout.token_bytes, dtype=torch.uint8, device="cuda")
        window = torch.empty(2, heads, WINDOW_TOKENS, 2 * dim, dtype=torch.bfloat16, device="cuda")
        slots = torch.arange(tokens, device="cuda") + PAGE_TOKENS
        none = torch.zeros_like(slots)
        return lambda: write_triton(key, value, history, window, slots, none, recipe)

    time = graph_microseconds([one() for _ in range(sets_for(moved))])
    name = f"{rounds} rounds" + (" from moments" if moments else "") if clip == 1.0 else f"clip {clip}"
    return WriteRow(tokens, heads, dim, name, time, moved, moved / bandwidth * 1e6)


def run(
    json_path: Path | None = None,
    plot_path: Path | None = None,
    *,
    models: Iterable[str] = LAYOUTS,
    points: Iterable[tuple[int, int]] = POINTS,
    writes: Iterable[int] = WRITES,
    rivals: bool = True,
    console: Console | None = None,
) -> dict[str, Any]:
    """Measure, print the tables, and write them as JSON and a roofline plot where paths are given.

    Args:
        json_path: where the numbers go.
        plot_path: where the PNG goes (needs matplotlib).
        models: names in ``LAYOUTS`` to run.
        points: (batch, length) pairs to run.
        writes: numbers of new tokens of the write rows.
        rivals: also time FlashAttention-3 and xformers where they are installed.
        console: where to print.

    Returns:
        What the JSON holds: ``device``, ``copy_bandwidth`` (bytes per second), ``decode`` and ``write`` rows.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, _TABLE_WIDTH)
    torch.manual_seed(0)
    bandwidth = copy_bandwidth()
    name = torch.cuda.get_device_name()
    versions = {"torch": torch.__version__, "triton": _version("triton"), "vllm": _version("vllm")}
    console.print(f"{name}: copy bandwidth {bandwidth / 1e12:.2f} TB/s, {versions}, Python {platform.python_version()}")
    room = 0.8 * torch.cuda.get_device_properties(0).total_memory
    rows: list[DecodeRow] = []
    written: list[WriteRow] = []

    def result() -> dict[str, Any]:
        """What is known so far; saved after every row, so that a run cut short leaves its rows."""
        known = {
            "device": name,
            "versions": versions,
            "copy_bandwidth": bandwidth,
            "decode": [asdict(row) for row in rows],
            "write": [asdict(row) for row in written],
        }
        if json_path:
            json_path.write_text(json.dumps(known, indent=1) + "\n")
        return known

    for tokens in writes:
        for rounds, moments, clip in QUANTIZERS:
            written.append(write_row(tokens, rounds, moments, clip, bandwidth))
            result()
    for model in models:
        for batch, length in points:
            need = Shape(*LAYOUTS[model], batch, length).flash_bytes
            if sets_for(need) * need * 1.5 < room:
                row = decode_row(model, batch, length, bandwidth, rivals)
                rows.append(row)
                result()
                times = " / ".join(_number(x) for x in (row.oscar, row.flash_bf16, row.flash_fp8, row.xformers))
                console.print(f"{model}, {batch} x {length}: {times}", highlight=False)
    console.print(decode_table(rows))
    console.print(write_table(written))
    for note in sorted({note for row in rows for note in row.notes}):
        console.print(f"note: {note}")
    if plot_path:
        from oscar_vllm.bench.plot import roofline_plot

        roofline_plot(rows, bandwidth, name, plot_path)
    return result()


def _version(module: str) -> str:
    try:
        return str(__import__(module).__version__)
    except ImportError:
        return "not installed"


def _number(value: float | None, digits: int = 1, unit: str = "") -> str:
    return "-" if value is None else f"{value:.{digits}f}{unit}"


def decode_table(rows: list[DecodeRow]) -> Table:
    """Rich table of the decode rows."""
    table = Table(title="one decode step of a layer, microseconds")
    heads = ("model", "heads", "batch", "length", "OSCAR", "FA3 BF16", "FA3 FP8", "xformers", "x BF16", "x FP8")
    for head in (*heads, "roofline", "of roofline"):
        table.add_column(head, justify="left" if head == "model" else "right", no_wrap=True)
    for row in rows:
        table.add_row(
            row.model,
            f"{row.query_heads}/{row.heads}",
            str(row.batch),
            str(row.length),
            _number(row.oscar),
            _number(row.flash_bf16),
            _number(row.flash_fp8),
            _number(row.xformers),
            _number(row.ratio(row.flash_bf16), 2),
            _number(row.ratio(row.flash_fp8), 2),
            _number(row.oscar_roofline),
            _number(row.oscar and 100 * row.oscar_roofline / row.oscar, 0, " %"),
        )
    return table


def write_table(rows: list[WriteRow]) -> Table:
    """Rich table of the write rows."""
    table = Table(title="write of new tokens, K and V, microseconds")
    for head in ("tokens", "heads", "quantizer", "time", "roofline", "x roofline"):
        table.add_column(head, justify="right")
    for row in rows:
        times = (_number(row.microseconds, 2), _number(row.roofline, 2), _number(row.microseconds / row.roofline, 1))
        table.add_row(str(row.tokens), str(row.heads), row.quantizer, *times)
    return table
