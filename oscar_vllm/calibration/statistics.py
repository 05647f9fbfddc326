"""What calibration remembers of one attention layer: sums of products, never activations."""

from collections.abc import Mapping, Sequence
from typing import Any, Self

import torch

from oscar_vllm.calibration.sample import sink_tokens

_CHUNK = 512
"""Tokens multiplied at once; bounds the float64 copies to a few MB a tensor."""
_GRAMS = ("query_gram", "output_gram", "key_gram", "value_gram")
_SUMS = ("key_sum", "value_sum", "output_sum")
_OF_QUERIES = ("query_gram", "output_gram", "output_sum", "rows")


class LayerStatistics:
    """Running sums over the tokens of one layer, per KV head, float64. H KV heads, D channels.

    Products are taken in float64 too: with a large mean (key biases) the centered covariance is a small difference of
    large sums, and float32 products would leave it little. Memory does not depend on the number of tokens.

    Attributes:
        query_gram: [H, D, D] sum of qᵀq over tokens and the query heads of each KV head.
        output_gram: [H, D, D] sum of oᵀo over the same rows; since O = S V this is Vᵀ Sᵀ S V, exactly.
        key_gram: [H, D, D] sum of kᵀk.
        value_gram: [H, D, D] sum of vᵀv.
        key_sum: [H, D].
        value_sum: [H, D].
        output_sum: [H, D] over the rows of output_gram; what centering OᵀO needs.
        tokens: how many tokens were added.
        rows: query rows per KV head, tokens times the group size.
    """

    def __init__(self, kv_heads: int, head_size: int, device: torch.device | str = "cpu") -> None:
        H, D = kv_heads, head_size
        for name in _GRAMS:
            setattr(self, name, torch.zeros(H, D, D, dtype=torch.float64, device=device))
        for name in _SUMS:
            setattr(self, name, torch.zeros(H, D, dtype=torch.float64, device=device))
        self.tokens = 0
        self.rows = 0

    query_gram: torch.Tensor
    output_gram: torch.Tensor
    key_gram: torch.Tensor
    value_gram: torch.Tensor
    key_sum: torch.Tensor
    value_sum: torch.Tensor
    output_sum: torch.Tensor

    def update(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> None:
        """Add T tokens: query and output [T, H * group, D], key and value [T, H, D]; any float dtype and device.

        Query and key after rotary embedding, output before the output projection, all of one prefill. Consecutive
        query heads share a KV head, as in every grouped-query model.
        """
        for start in range(0, key.shape[0], _CHUNK):
            part = slice(start, start + _CHUNK)
            q, k, v, o = (self._by_head(x[part]) for x in (query, key, value, output))
            self.query_gram.baddbmm_(q.mT, q)
            self.output_gram.baddbmm_(o.mT, o)
            self.key_gram.baddbmm_(k.mT, k)
            self.value_gram.baddbmm_(v.mT, v)
            self.key_sum += k.sum(1)
            self.value_sum += v.sum(1)
            self.output_sum += o.sum(1)
        self.tokens += key.shape[0]
        self.rows += query.shape[0] * query.shape[1] // key.shape[1]

    def to(self, device: torch.device | str) -> Self:
        """The same numbers on a device."""
        tensors = {name: getattr(self, name).to(device) for name in (*_GRAMS, *_SUMS)}
        return self.from_state_dict(tensors | {"tokens": self.tokens, "rows": self.rows})

    def merge(self, other: Self) -> None:
        """Add the tokens of other statistics of the same layer and heads."""
        for name in (*_GRAMS, *_SUMS):
            getattr(self, name).add_(getattr(other, name).to(self.key_sum.device))
        self.tokens += other.tokens
        self.rows += other.rows

    @classmethod
    def join_heads(cls, parts: Sequence[Self]) -> Self:
        """The statistics of one layer from those of its KV heads in order (tensor-parallel ranks), on the CPU.

        Raises:
            ValueError: the parts saw different numbers of tokens.
        """
        if len({(part.tokens, part.rows) for part in parts}) != 1:
            raise ValueError("The parts of a layer's statistics saw different tokens; calibrate all ranks on one text.")
        states = [part.state_dict() for part in parts]
        return cls.from_state_dict(
            states[0] | {name: torch.cat([state[name] for state in states]) for name in (*_GRAMS, *_SUMS)}
        )

    @classmethod
    def join_queries(cls, parts: Sequence[Self]) -> Self:
        """The statistics of the same KV heads from ranks that hold different query heads of them, on the CPU.

        Raises:
            ValueError: the parts saw different numbers of tokens.
        """
        if len({part.tokens for part in parts}) != 1:
            raise ValueError("The parts of a layer's statistics saw different tokens; calibrate all ranks on one text.")
        states = [part.state_dict() for part in parts]
        return cls.from_state_dict(
            states[0] | {name: sum((s[name] for s in states[1:]), states[0][name]) for name in _OF_QUERIES}
        )

    def state_dict(self) -> dict[str, Any]:
        """Tensors on the CPU and counts, for ``torch.save``."""
        tensors = {name: getattr(self, name).cpu() for name in (*_GRAMS, *_SUMS)}
        return tensors | {"tokens": self.tokens, "rows": self.rows}

    @classmethod
    def from_state_dict(cls, state: Mapping[str, Any]) -> Self:
        """The inverse of ``state_dict``."""
        statistics = cls(0, 0)
        for name in (*_GRAMS, *_SUMS, "tokens", "rows"):
            setattr(statistics, name, state[name])
        return statistics

    @property
    def query_covariance(self) -> torch.Tensor:
        """[H, D, D] QᵀQ / rows, not centered: a key error meets the query itself, its mean included."""
        return self.query_gram / max(self.rows, 1)

    @property
    def key_mean(self) -> torch.Tensor:
        """[H, D]"""
        return self.key_sum / max(self.tokens, 1)

    @property
    def value_mean(self) -> torch.Tensor:
        """[H, D]"""
        return self.value_sum / max(self.tokens, 1)

    def key_covariance(self, mean: torch.Tensor | None = None) -> torch.Tensor:
        """[H, D, D] of keys less ``mean`` [H, D] (None: as they are)."""
        return _shifted(self.key_gram / max(self.tokens, 1), self.key_mean, mean)

    def value_covariance(self, mean: torch.Tensor | None = None) -> torch.Tensor:
        """[H, D, D] of values less ``mean`` [H, D] (None: as they are)."""
        return _shifted(self.value_gram / max(self.tokens, 1), self.value_mean, mean)

    def output_covariance(self, mean: torch.Tensor | None = None) -> torch.Tensor:
        """[H, D, D] of attention outputs if ``mean`` [H, D] is taken off every value (None: as they are).

        The rows of S sum to 1, so S (V - 1 mean) = O - 1 mean: shifting the outputs shifts the values.
        """
        return _shifted(self.output_gram / max(self.rows, 1), self.output_sum / max(self.rows, 1), mean)

    def _by_head(self, x: torch.Tensor) -> torch.Tensor:
        """[T, H * g, D] -> [H, T * g, D] float64; query heads h * g ... h * g + g - 1 belong to KV head h."""
        H, D = self.key_sum.shape
        x = x.to(self.key_sum.device, torch.float64)
        return x.reshape(x.shape[0], H, -1, D).transpose(0, 1).reshape(H, -1, D)


class BehindSinks:
    """Adds prefills to a layer's statistics without their sinks.

    Served, the first tokens lie in a window of their own and are never quantized; and they are outliers (attention
    dumps what it does not need on them), so that a few of them would bend the means and covariances of all others.
    """

    def __init__(self, statistics: LayerStatistics) -> None:
        self.statistics = statistics

    def update(self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, output: torch.Tensor) -> None:
        """As ``LayerStatistics.update``, of a whole prefill."""
        first = sink_tokens(key.shape[0])
        self.statistics.update(query[first:], key[first:], value[first:], output[first:])


def _shifted(second_moment: torch.Tensor, first_moment: torch.Tensor, mean: torch.Tensor | None) -> torch.Tensor:
    """E[(x - m)ᵀ(x - m)] from E[xᵀx] and E[x]."""
    if mean is None:
        return second_moment
    cross = first_moment.unsqueeze(-1) * mean.unsqueeze(-2)
    return second_moment - cross - cross.mT + mean.unsqueeze(-1) * mean.unsqueeze(-2)
