"""The roofline plot of ``oscar bench kernels``."""

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from oscar_vllm.bench.kernels import DecodeRow


def roofline_plot(rows: "list[DecodeRow]", bandwidth: float, device: str, path: Path) -> None:
    """Time of a step over the 16-bit size of the K and V it attends to, beside the bandwidth limits (log-log PNG)."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5.5), layout="constrained")
    contenders = (
        ("OSCAR INT2", "oscar", "o", "tab:green"),
        ("FlashAttention-3 FP8", "flash_fp8", "^", "tab:orange"),
        ("FlashAttention-3 BF16", "flash_bf16", "s", "tab:red"),
        ("xformers split-K BF16", "xformers", "x", "tab:gray"),
    )
    for label, field, marker, color in contenders:
        points = [(row.flash_bytes, getattr(row, field)) for row in rows if getattr(row, field)]
        if points:
            axes.scatter(
                [x for x, _ in points], [y for _, y in points], s=22, marker=marker, color=color, label=label, zorder=3
            )
    exact = [row.flash_bytes for row in rows]
    limits = (
        ("BF16 at copy bandwidth", [row.flash_roofline for row in rows], "tab:red"),
        ("windows and INT2 at copy bandwidth", [row.oscar_roofline for row in rows], "tab:green"),
    )
    for label, times, color in limits:
        axes.scatter(exact, times, s=60, marker="_", color=color, label=label)
    axes.set_xscale("log")
    axes.set_yscale("log")
    axes.set_ylim(bottom=1)  # limits far below any launch say nothing
    axes.set_xlabel("K and V of the batch at 16 bits, bytes a layer")
    axes.set_ylabel("one decode step of a layer, microseconds")
    axes.set_title(f"{device}, copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    axes.grid(True, which="both", alpha=0.25)
    axes.legend()
    figure.savefig(path, dpi=130)
    plt.close(figure)
