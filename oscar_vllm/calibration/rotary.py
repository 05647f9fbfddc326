"""How a layer's queries and keys turn with their position (rotary embedding), read from the served model."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

_FIRST_ROWS = (1, 4, 16, 64, 256, 1024, 4096)
"""Positions whose phases the angles are read from, each sharper than the last: a table in BF16 has three digits."""
_TOLERANCE = 0.02
"""Radians that a phase may be off, by the table's rounding."""


@dataclass(frozen=True)
class Rotary:
    """Pairs of channels that turn by an angle proportional to the position."""

    angle: torch.Tensor
    """[R / 2] float64 radians a position; channels behind the first R do not turn."""
    halves: bool
    """Channel i turns with channel i + R / 2 (NeoX style), else 2 i with 2 i + 1."""
    positions: int
    """That the model was made for."""

    @classmethod
    def of(cls, module: Any) -> Self | None:
        """The rotary embedding of a vLLM module; None where its angles do not grow with the position."""
        table = getattr(module, "cos_sin_cache", None)
        if not isinstance(table, torch.Tensor) or table.dim() != 2:
            return None
        cos, sin = table.detach().cpu().double().chunk(2, -1)
        phase = torch.atan2(sin, cos)
        angle = phase[1] if len(table) > 1 else phase[0]
        for row in _FIRST_ROWS:
            if row < len(table):
                angle = angle + _wrapped(phase[row] - row * angle) / row
        known = [row for row in _FIRST_ROWS if row < len(table)]
        if any(_wrapped(phase[row] - row * angle).abs().max() > _TOLERANCE for row in known):
            return None
        return cls(angle, bool(getattr(module, "is_neox_style", True)), len(table))

    def turn(self, rows: torch.Tensor, position: torch.Tensor) -> torch.Tensor:
        """Rows [..., T, D] as they were ``position`` [T] further on; float64."""
        phase = position.double().to(rows.device)[:, None] * self.angle.to(rows.device)
        cos, sin = phase.cos(), phase.sin()
        rows, half = rows.double(), len(self.angle)
        turning, rest = rows[..., : 2 * half], rows[..., 2 * half :]
        if self.halves:
            first, second = turning.chunk(2, -1)
        else:
            first, second = turning[..., ::2], turning[..., 1::2]
        turned = (first * cos - second * sin, second * cos + first * sin)
        return torch.cat([torch.cat(turned, -1) if self.halves else torch.stack(turned, -1).flatten(-2), rest], -1)

    def state_dict(self) -> dict[str, Any]:
        """For ``torch.save``."""
        return {"angle": self.angle, "halves": self.halves, "positions": self.positions}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of ``state_dict``."""
        return cls(**state)


def _wrapped(phase: torch.Tensor) -> torch.Tensor:
    """Into (-pi, pi]."""
    return torch.remainder(phase + math.pi, 2 * math.pi) - math.pi


class RotaryWatch:
    """Tells which rotary embedding each attention layer's queries went through: the last one called before it.

    A layer without one (some models turn only every other layer's) has none, whatever its module holds.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._last: torch.nn.Module | None = None
        self._hooks = [
            module.register_forward_hook(self._called)
            for module in model.modules()
            if isinstance(getattr(module, "cos_sin_cache", None), torch.Tensor)
        ]

    def _called(self, module: torch.nn.Module, *_: Any) -> None:
        self._last = module

    def take(self) -> torch.nn.Module | None:
        """The module called since the last ``take``."""
        last, self._last = self._last, None
        return last

    def close(self) -> None:
        for hook in self._hooks:
            hook.remove()
