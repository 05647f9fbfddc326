"""A bounded piece of held-out attention per layer: what a quantizer is chosen on."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from oscar_vllm.calibration.rotary import RotaryWatch

SAMPLES = 4
"""Sequences of a layer; one alone is too little to choose among quantizers that lie close together."""
SAMPLE_TOKENS = 1024
"""Of one sequence; the memory of a sample does not depend on how many tokens are calibrated on."""
QUERIES = 64
"""Positions whose queries are kept."""
SINK, RECENT = 64, 256
"""Keys that a served query reads unquantized (the default windows); scaled down in sequences too short for them."""
_TENSORS = ("query", "key", "value", "position")


def sink_tokens(length: int) -> int:
    """Tokens at the beginning of a sequence of ``length`` that calibration takes for sinks."""
    return min(SINK, length // 16)


@dataclass(frozen=True)
class AttentionSample:
    """One sequence of one layer: all its keys and values, and the queries of some positions. H KV heads of G queries.

    Kept for a sequence that the statistics have not seen, in the model's dtype: at 1,024 tokens, 64 queries, 8 KV heads
    of 4 queries and 128 channels 4.7 MB a layer.
    """

    query: torch.Tensor
    """[H, G, N, D] after rotary embedding"""
    key: torch.Tensor
    """[H, T, D] after rotary embedding"""
    value: torch.Tensor
    """[H, T, D]"""
    position: torch.Tensor
    """[N] int64, rising; the query of position p attends to keys 0 ... p."""
    scale: float
    """Of the scores."""

    @classmethod
    def take(cls, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float) -> Self:
        """From a whole prefill: query [T, H * G, D], key and value [T, H, D]; the first SAMPLE_TOKENS are used."""
        T, H = key.shape[:2]
        T = min(T, SAMPLE_TOKENS)
        # From the half on, so that every query has a history; the last one is the last token.
        position = torch.linspace(T // 2, T - 1, min(QUERIES, T - T // 2)).long()
        # Heads first and copied: the activations are views of buffers that the next layer overwrites.
        q = query[:T][position.to(query.device)].unflatten(1, (H, -1)).permute(1, 2, 0, 3).contiguous()
        k, v = (x[:T].transpose(0, 1).clone(memory_format=torch.contiguous_format) for x in (key, value))
        return cls(q, k, v, position, scale)

    def history(self) -> torch.Tensor:
        """[N, T] bool: the keys that a served query of each position reads in two bits."""
        T = self.key.shape[1]
        sink, recent = sink_tokens(T), min(RECENT, T // 4)
        keys, position = torch.arange(T), self.position.cpu()[:, None]
        return ((keys >= sink) & (keys < position - recent)).to(self.key.device)

    def to(self, device: torch.device | str) -> Self:
        tensors = {name: getattr(self, name).to(device) for name in _TENSORS}
        return type(self)(**tensors, scale=self.scale)

    def state_dict(self) -> dict[str, Any]:
        """Tensors on the CPU and the scale, for ``torch.save``."""
        return {name: getattr(self, name).cpu() for name in _TENSORS} | {"scale": self.scale}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of ``state_dict``."""
        return cls(**state)

    @classmethod
    def join_heads(cls, parts: Sequence[Self]) -> Self:
        """The sample of one layer from those of its KV heads in order (tensor-parallel ranks).

        Raises:
            ValueError: the parts are of different sequences.
        """
        first = parts[0]
        if any(part.key.shape[1:] != first.key.shape[1:] or part.scale != first.scale for part in parts):
            raise ValueError("The parts of a layer's sample are of different sequences; sample all ranks on one text.")
        joined = {name: torch.cat([getattr(part, name) for part in parts]) for name in _TENSORS[:3]}
        return cls(**joined, position=first.position, scale=first.scale)

    @classmethod
    def join_queries(cls, parts: Sequence[Self]) -> Self:
        """The sample of the same KV heads from ranks that hold different query heads of them."""
        first = parts[0]
        return cls(torch.cat([part.query for part in parts], 1), first.key, first.value, first.position, first.scale)


class SampleObserver:
    """Takes a sample of every prefill it sees, and notes which rotary embedding its queries went through."""

    def __init__(self, scale: float, watch: RotaryWatch) -> None:
        self.scale = scale
        self.watch = watch
        self.rotary: torch.nn.Module | None = None
        self.samples: list[AttentionSample] = []

    def update(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> None:
        """As ``LayerStatistics.update``; the output is not needed."""
        self.rotary = self.watch.take()
        self.samples.append(AttentionSample.take(query, key, value, self.scale))
