"""Numbers about a layer that ``oscar inspect`` shows, from what calibration brought home."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from oscar_vllm.calibration.search import Choice
from oscar_vllm.recipe_diagnostics import SPECTRUM_POINTS, RecipeDiagnostics, SideDiagnostics


@dataclass(frozen=True)
class Side:
    """One layer's keys or values: what is subtracted, their covariance about it, what an error meets, the choice."""

    mean: torch.Tensor
    """[H, D], zero where rows are not centered."""
    covariance: torch.Tensor
    """[H, D, D]"""
    weight: torch.Tensor
    """[H, D, D]"""
    choice: Choice


def diagnose(keys: Sequence[Side], values: Sequence[Side], sample_tokens: int) -> RecipeDiagnostics:
    """Diagnostics of all layers, in order; ``sample_tokens`` 0 if there was no search."""
    return RecipeDiagnostics(
        sample_tokens=sample_tokens,
        key=_side(keys, sample_tokens > 0),
        value=_side(values, sample_tokens > 0),
    )


def _side(layers: Sequence[Side], searched: bool) -> SideDiagnostics:
    return SideDiagnostics(
        transform=[[side.choice.transform.name] * len(side.covariance) for side in layers],
        condition=[_short(torch.linalg.cond(side.choice.transform.stored.double())) for side in layers],
        spread=[_short(side.covariance.diagonal(dim1=-2, dim2=-1).sum(-1).clamp_min(0).sqrt()) for side in layers],
        spectrum=[_spectrum(side.covariance) for side in layers],
        weight_spectrum=[_spectrum(side.weight) for side in layers],
        error=[_short(side.choice.error) for side in layers] if searched else [],
        baseline=[_short(side.choice.baseline) for side in layers] if searched else [],
    )


def _spectrum(covariance: torch.Tensor) -> list[float]:
    values = torch.linalg.eigvalsh(covariance.double()).flip(-1)
    relative = values / values[:, :1].clamp_min(1e-300)
    at = torch.linspace(0, values.shape[-1] - 1, SPECTRUM_POINTS).round().long()
    # Below 1e-12 float64 has nothing to say.
    return _short(relative[:, at.to(values.device)].clamp_min(1e-12).log().mean(0).exp())


def _short(numbers: torch.Tensor) -> list[float]:
    """Four significant digits: they are read by people and stay small in the file's header."""
    return [float(f"{number:.4g}") for number in numbers.tolist()]
