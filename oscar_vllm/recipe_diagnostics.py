"""What calibration found out about a model, kept in the recipe for ``oscar inspect``; serving does not read it."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

Number = Annotated[float, Field(allow_inf_nan=False)]
PerHead = list[list[Number]]
"""[L][H]"""
SPECTRUM_POINTS = 9
"""Eigenvalues kept of a spectrum: at 0, 1/8, ... 1 of the way from the largest to the smallest."""


class SideDiagnostics(BaseModel):
    """The keys or the values of a model, layer by layer."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    transform: list[list[str]]
    """[L][H] "geometric mean", "rotation", ..."""
    condition: PerHead
    """Condition number of the stored transform."""
    spread: PerHead
    """Root mean square norm of the rows about their mean."""
    spectrum: PerHead
    """[L][SPECTRUM_POINTS] eigenvalues of the rows' covariance relative to the largest, geometric mean over heads."""
    weight_spectrum: PerHead
    """The same of what an error meets: QᵀQ for keys, OᵀO for values."""
    error: PerHead
    """On held-out attention: KL of the attention weights in nats for keys, share of the output's variance for values.
    Empty without a search."""
    baseline: PerHead
    """The same error with the published rotation and clip."""

    def search_gain(self, layer: int) -> float:
        """Baseline error over error, both summed over the heads of a layer; 1 without a search."""
        if not self.error:
            return 1.0
        return sum(self.baseline[layer]) / max(sum(self.error[layer]), 1e-30)


class RecipeDiagnostics(BaseModel):
    """Of all layers."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    sample_tokens: Annotated[int, Field(ge=0)]
    """Held-out tokens of the search, 0 without one."""
    key: SideDiagnostics
    value: SideDiagnostics
