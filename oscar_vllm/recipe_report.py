"""What ``oscar inspect`` prints and draws of a recipe."""

from collections import Counter
from pathlib import Path

import torch
from rich import box
from rich.console import Console
from rich.table import Table

from oscar_vllm.recipe import OscarRecipe
from oscar_vllm.recipe_diagnostics import SideDiagnostics
from oscar_vllm.recipe_format import RecipeError

SHORT = {"geometric mean": "gm", "rotation": "R", "rotation per layer": "R of the layer", "hadamard": "H"}
"""Transforms as the tables show them."""

LEGEND = (
    "transform: gm geometric mean, R rotation, H Hadamard, with the number of heads where they differ",
    "cond: condition number of the worst head; gain: on the step between levels",
    "mean: norm of the mean over the spread of the rows about it (above 1, centering saves the layer)",
    "dims: dimensions that hold 90 % of the energy, of the rows / of what their error meets",
)
SEARCH_LEGEND = (
    "error: on {tokens:,} held-out tokens, for keys the KL of the attention weights in nats, for values the share of "
    "the output's variance; better: how many times less than with the published rotation and clip"
)


def report(recipe: OscarRecipe, console: Console) -> None:
    """Print what the recipe was made for and how, and one table each for its keys and its values."""
    data = recipe.metadata
    centered = "centered" if data.centered else "NOT centered"
    tokens = f"calibrated on {data.tokens:,} tokens" if data.tokens else "not calibrated"
    positions = f"keys followed over {data.positions:,} positions" if data.positions else "keys not followed far on"
    console.print(f"Recipe {recipe.content_hash()[:12]} of {data.model} ({data.geometry})", soft_wrap=True)
    console.print(
        f"method {data.method}, {tokens}, {centered}, {positions}, "
        f"{data.rounds} least-squares rounds from the {data.start}",
        soft_wrap=True,
    )
    for name in ("key", "value"):
        console.print(_table(recipe, name))
    if data.diagnostics is None:
        console.print("The recipe keeps no diagnostics; `oscar calibrate` writes them.")
        return
    for line in LEGEND:
        console.print(line, soft_wrap=True)
    if data.diagnostics.sample_tokens:
        console.print(SEARCH_LEGEND.format(tokens=data.diagnostics.sample_tokens), soft_wrap=True)


def _table(recipe: OscarRecipe, name: str) -> Table:
    side = None if recipe.metadata.diagnostics is None else getattr(recipe.metadata.diagnostics, name)
    table = Table(title=f"{name}s", title_justify="left", box=box.SIMPLE, padding=(0, 1, 0, 0), pad_edge=False)
    columns = ["layer", "transform", "cond", "clip", "gain", "mean"]
    columns += ["dims", "error", "better"] if side else []
    for column in columns:
        table.add_column(column, justify="left" if column == "transform" else "right", no_wrap=True)
    condition = torch.linalg.cond(getattr(recipe, name).double())
    for layer in range(recipe.geometry.num_layers):
        mean = getattr(recipe, f"{name}_mean")[layer].norm(dim=-1)
        clip, gain = (getattr(recipe, f"{name}_{what}")[layer] for what in ("clip", "gain"))
        row = [
            str(layer),
            _transforms(side, layer) if side else recipe.metadata.method,
            f"{condition[layer].max():.1f}",
            _range(clip),
            _range(gain),
            f"{(mean / _spread(side, layer)).mean():.2f}" if side else f"{mean.mean():.2f}",
        ]
        table.add_row(*row, *(_measured(side, layer, recipe.geometry.head_size) if side else []))
    return table


def _transforms(side: SideDiagnostics, layer: int) -> str:
    counts = Counter(side.transform[layer])
    short = [(SHORT.get(name, name), count) for name, count in counts.most_common()]
    return ", ".join(f"{name} {count}" if len(counts) > 1 else name for name, count in short)


def _spread(side: SideDiagnostics, layer: int) -> torch.Tensor:
    return torch.tensor(side.spread[layer]).clamp_min(1e-30)


def _measured(side: SideDiagnostics, layer: int, size: int) -> list[str]:
    dims = f"{energy_dims(side.spectrum[layer], size)}/{energy_dims(side.weight_spectrum[layer], size)}"
    if not side.error:
        return [dims, "-", "-"]
    error = sum(side.error[layer]) / len(side.error[layer])
    return [dims, f"{error:.1e}", f"{side.search_gain(layer):.1f}x"]


def energy_dims(spectrum: list[float], size: int, share: float = 0.9) -> int:
    """How many of the ``size`` largest eigenvalues hold a share of their sum, from the points kept of a spectrum."""
    points = torch.tensor(spectrum, dtype=torch.float64).log()
    at = torch.linspace(0, len(spectrum) - 1, size, dtype=torch.float64)
    low = at.long().clamp(max=len(spectrum) - 2)
    values = (points[low] + (at - low) * (points[low + 1] - points[low])).exp()
    return int((values.cumsum(0) < share * values.sum()).sum()) + 1


def _range(numbers: torch.Tensor) -> str:
    low, high = numbers.min().item(), numbers.max().item()
    return f"{low:.2f}" if low == high else f"{low:.2f}-{high:.2f}"


def draw(recipe: OscarRecipe, path: Path) -> None:
    """Draw spectra, errors, gains and means of every layer to a PNG.

    Raises:
        RecipeError: no diagnostics in the recipe, no matplotlib, or the file cannot be written.
    """
    diagnostics = recipe.metadata.diagnostics
    if diagnostics is None:
        raise RecipeError("The recipe keeps no diagnostics to draw; make it again with `oscar calibrate MODEL`.")
    try:
        import matplotlib.pyplot as plt
    except ImportError:
        raise RecipeError("Drawing needs matplotlib; install oscar-vllm[demo].") from None
    figure, axes = plt.subplots(2, 4, figsize=(18, 8), layout="constrained")
    layers = range(recipe.geometry.num_layers)
    for row, name in zip(axes, ("key", "value"), strict=True):
        side: SideDiagnostics = getattr(diagnostics, name)
        spread = torch.tensor(side.spread).clamp_min(1e-30)
        ratio = getattr(recipe, f"{name}_mean").norm(dim=-1) / spread
        for panel, spectra, what in (
            (row[0], side.spectrum, "rows"),
            (row[1], side.weight_spectrum, "what errors meet"),
        ):
            for layer in layers:
                panel.semilogy(spectra[layer], color=plt.cm.viridis(layer / max(len(layers) - 1, 1)), linewidth=0.8)
            panel.set(title=f"{name}s: spectra of {what}", xlabel="eighths of the channels; dark: first layer")
        row[2].plot(layers, ratio, ".")
        row[2].set(title=f"{name}s: mean over spread, by head", xlabel="layer")
        if side.error:
            row[3].semilogy(layers, torch.tensor(side.baseline).mean(1), label="published rotation and clip")
            row[3].semilogy(layers, torch.tensor(side.error).mean(1), label="this recipe")
            row[3].legend()
        row[3].set(title=f"{name}s: error on held-out attention", xlabel="layer")
    try:
        figure.savefig(path, dpi=110)
    except OSError as error:
        raise RecipeError(f"The plot cannot be written to {path} ({error.strerror}); choose another path.") from None
    finally:
        plt.close(figure)
