"""Pictures of an evaluation's figures: KL by method, and needles found by length and depth."""

from pathlib import Path
from typing import Any

from oscar_vllm.evaluation.methods import EvaluationError


def draw(figures: dict[str, Any], folder: Path) -> list[Path]:
    """Write ``kl.png`` and ``needle.png``, as far as there are figures for them; returns the files."""
    folder.mkdir(parents=True, exist_ok=True)
    drawn = []
    if figures.get("distribution", {}).get("rows"):
        drawn.append(_draw_kl(figures, folder / "kl.png"))
    if figures.get("needle"):
        drawn.append(_draw_needle(figures, folder / "needle.png"))
    return drawn


def _pyplot() -> Any:
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise EvaluationError("--plots needs the package matplotlib; pip install matplotlib.") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def _draw_kl(figures: dict[str, Any], file: Path) -> Path:
    pyplot = _pyplot()
    rows = sorted(figures["distribution"]["rows"].items(), key=lambda item: -item[1]["kl"])
    titles = [_title(figures, name) for name, _ in rows]
    ours = ["#d1495b" if name.startswith("ours") else "#30638e" for name, _ in rows]
    figure, axes = pyplot.subplots(figsize=(8, 0.42 * len(rows) + 1.2))
    bars = axes.barh(titles, [row["kl"] for _, row in rows], color=ours)
    axes.bar_label(bars, [f"{row['kl']:.4f}" for _, row in rows], padding=3, fontsize=8)
    axes.set_xscale("log")
    axes.margins(x=0.15)
    axes.set_xlabel("KL(BF16 || method) of the next token, nats, log scale")
    axes.set_title(f"{figures['model']}: {rows[0][1]['positions']:,} positions", fontsize=10)
    figure.tight_layout()
    figure.savefig(file, dpi=150)
    pyplot.close(figure)
    return file


def _title(figures: dict[str, Any], name: str) -> str:
    method = figures["methods"][name]
    return str(method["title"]) + (" (reference maths)" if method["path"] != "served" else "")


def _draw_needle(figures: dict[str, Any], file: Path) -> Path:
    pyplot = _pyplot()
    panels = figures["needle"]
    figure, axes = pyplot.subplots(1, len(panels), figsize=(3 * len(panels) + 1, 3.2), squeeze=False, sharey=True)
    for place, (name, cells) in zip(axes[0], panels.items(), strict=True):
        lengths = sorted({cell["length"] for cell in cells})
        depths = sorted({cell["depth"] for cell in cells})
        shares = [[0.0] * len(lengths) for _ in depths]
        for cell in cells:
            shares[depths.index(cell["depth"])][lengths.index(cell["length"])] = cell["hits"] / cell["prompts"]
        image = place.imshow(shares, vmin=0, vmax=1, cmap="RdYlGn", aspect="auto")
        place.set_xticks(range(len(lengths)), [f"{length:,}" for length in lengths], fontsize=8)
        place.set_yticks(range(len(depths)), [f"{depth:.0%}" for depth in depths], fontsize=8)
        found, asked = sum(cell["hits"] for cell in cells), sum(cell["prompts"] for cell in cells)
        place.set_title(f"{figures['methods'][name]['title']}\n{found} of {asked}", fontsize=9)
        place.set_xlabel("prompt tokens", fontsize=8)
    axes[0][0].set_ylabel("depth of the needle", fontsize=8)
    figure.colorbar(image, ax=list(axes[0]), label="found")
    figure.savefig(file, dpi=150, bbox_inches="tight")
    pyplot.close(figure)
    return file
