"""Everything calibration brings home of one attention layer, and how the parts of several ranks become one."""

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self, TypeVar

import torch

from oscar_vllm.calibration.rotary import Rotary
from oscar_vllm.calibration.sample import AttentionSample
from oscar_vllm.calibration.statistics import LayerStatistics


@dataclass(frozen=True)
class LayerCalibration:
    """One layer's statistics and held-out samples, of all its KV heads or of one rank's."""

    statistics: LayerStatistics
    samples: Sequence[AttentionSample] = ()
    """None at all: no search, the published clips."""
    output_weight: torch.Tensor | None = None
    """[H, D, D] W_o W_oᵀ of each KV head; None where it cannot be read, and then the identity is used."""
    rotary: Rotary | None = None
    """None where queries and keys do not turn with their position, or in another way."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors on the CPU, for ``torch.save``."""
        return {
            "statistics": self.statistics.state_dict(),
            "samples": [sample.state_dict() for sample in self.samples],
            "output_weight": None if self.output_weight is None else self.output_weight.cpu(),
            "rotary": None if self.rotary is None else self.rotary.state_dict(),
        }

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of ``state_dict``."""
        samples = [AttentionSample.from_state_dict(sample) for sample in state["samples"]]
        rotary = None if state["rotary"] is None else Rotary.from_state_dict(state["rotary"])
        return cls(LayerStatistics.from_state_dict(state["statistics"]), samples, state["output_weight"], rotary)

    @classmethod
    def join_heads(cls, parts: Sequence[Self]) -> Self:
        """One layer from its KV heads in order (tensor-parallel ranks), on the CPU.

        Raises:
            ValueError: the parts saw different texts.
        """
        return cls(
            LayerStatistics.join_heads([part.statistics for part in parts]),
            _join_samples([part.samples for part in parts], AttentionSample.join_heads),
            _of_all([part.output_weight for part in parts], torch.cat),
            parts[0].rotary,
        )

    @classmethod
    def join_queries(cls, parts: Sequence[Self]) -> Self:
        """The same KV heads from ranks that hold different query heads of them, on the CPU.

        Raises:
            ValueError: the parts saw different texts.
        """
        return cls(
            LayerStatistics.join_queries([part.statistics for part in parts]),
            _join_samples([part.samples for part in parts], AttentionSample.join_queries),
            _of_all([part.output_weight for part in parts], lambda weights: torch.stack(weights).sum(0)),
            parts[0].rotary,
        )


T = TypeVar("T")


def _join_samples(
    parts: Sequence[Sequence[AttentionSample]], join: Callable[[Sequence[AttentionSample]], AttentionSample]
) -> list[AttentionSample]:
    """The samples of every sequence joined.

    Raises:
        ValueError: the parts sampled different numbers of sequences.
    """
    if len({len(samples) for samples in parts}) != 1:
        raise ValueError("The parts of a layer sampled different sequences; sample all ranks on one text.")
    return [join(same) for same in zip(*parts, strict=True)]


def _of_all(parts: Sequence[T | None], join: Callable[[list[T]], T]) -> T | None:
    """The parts joined; None where one is missing."""
    there = [part for part in parts if part is not None]
    return join(there) if len(there) == len(parts) else None


def join_ranks(files: Sequence[str]) -> list[LayerCalibration]:
    """Every layer, in order, from the files of all ranks (heads over tensor, layers over pipeline parallel ranks)."""
    # layer -> first KV head -> ranks: with more ranks than KV heads, several ranks hold one head and share its queries.
    parts: dict[int, dict[int, list[LayerCalibration]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        saved = torch.load(file, weights_only=True)
        for layer, state in saved["layers"].items():
            parts[layer][saved["first_head"]].append(LayerCalibration.from_state_dict(state))
    return [
        LayerCalibration.join_heads([LayerCalibration.join_queries(ranks) for _, ranks in sorted(heads.items())])
        for _, heads in sorted(parts.items())
    ]
