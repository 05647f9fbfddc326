"""The transforms that a layer's keys and values may be stored with, by method."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from oscar_vllm.calibration.drift import drift, spread_covariance
from oscar_vllm.calibration.rotary import Rotary
from oscar_vllm.calibration.sample import AttentionSample
from oscar_vllm.calibration.search import Transform
from oscar_vllm.calibration.statistics import LayerStatistics
from oscar_vllm.calibration.transforms import geometric_mean_transform, hadamard, rotation

Method = Literal["geometric-mean", "oscar", "oscar-per-layer", "hadamard"]
METHODS: tuple[Method, ...] = get_args(Method)
RIDGE = 1e-2
"""Of the geometric mean. Bounds its condition number, and with it what rounding windows and queries to BF16 costs."""


@dataclass(frozen=True)
class LayerTransforms:
    """One layer's transforms."""

    key: Transform
    value: Transform
    published_key: Transform
    """OSCAR's rotation of each head, the baseline that a search is compared with."""
    published_value: Transform


def layer_transforms(
    statistics: LayerStatistics,
    output_weight: torch.Tensor | None,
    method: Method,
    key_mean: torch.Tensor,
    value_mean: torch.Tensor,
    samples: Sequence[AttentionSample] = (),
    rotary: Rotary | None = None,
) -> LayerTransforms:
    """Transforms of one layer, [H, D, D] float32 on the statistics' device.

    ``key_mean`` and ``value_mean`` [H, D] are subtracted from rows before they are transformed (zero: nothing is);
    ``samples`` and ``rotary`` tell what becomes of keys far on.

    - ``oscar``: R = U H P per KV head, R_K from QᵀQ. R_V has to spread what will be stored, weighted by attention as
      the output sees it: if values are stored less their mean m, that is (V - 1m)ᵀ SᵀS (V - 1m) = (O - 1m)ᵀ(O - 1m).
    - ``oscar-per-layer``: as published, one R for all heads of a layer.
    - ``geometric-mean``: the transform that balances the spread of what is stored against what an error of it costs,
      along the axes that the rotations use, behind the one along which keys drift.
    - ``hadamard``: H alone (QuaRot).
    """
    queries, outputs = statistics.query_covariance, statistics.output_covariance(value_mean)
    key, value = _rotation("rotation", rotation(queries)), _rotation("rotation", rotation(outputs))
    keys_spread, values_spread = statistics.key_covariance(key_mean), statistics.value_covariance(value_mean)
    methods: dict[Method, Callable[[], tuple[Transform, Transform]]] = {
        "oscar": lambda: (key, value),
        "oscar-per-layer": lambda: (_shared(queries), _shared(outputs)),
        "hadamard": lambda: (_hadamard(queries), _hadamard(outputs)),
        "geometric-mean": lambda: (
            _key_balance(keys_spread, queries, key_mean, samples, rotary),
            _geometric_mean(values_spread, _or_identity(output_weight, outputs), outputs),
        ),
    }
    return LayerTransforms(*methods[method](), key, value)


def _rotation(name: str, matrix: torch.Tensor) -> Transform:
    return Transform(name, matrix, matrix.mT.contiguous())


def _shared(covariance: torch.Tensor) -> Transform:
    return _rotation("rotation per layer", rotation(covariance.mean(0)).expand_as(covariance).contiguous())


def _hadamard(like: torch.Tensor) -> Transform:
    return _rotation("hadamard", hadamard(like.shape[-1]).to(like.device).float().expand_as(like).contiguous())


def _key_balance(
    spread: torch.Tensor,
    queries: torch.Tensor,
    mean: torch.Tensor,
    samples: Sequence[AttentionSample],
    rotary: Rotary | None,
) -> Transform:
    if rotary is None or not samples:
        return _geometric_mean(spread, queries, queries)
    spread, queries = (spread_covariance(matrix, rotary) for matrix in (spread, queries))
    return _geometric_mean(spread, queries, queries, drift(samples, rotary, mean))


def _geometric_mean(
    rows: torch.Tensor, weight: torch.Tensor, axes: torch.Tensor, drifting: torch.Tensor | None = None
) -> Transform:
    stored, read = geometric_mean_transform(rows, weight, axes, drift=drifting, ridge=RIDGE)
    return Transform("geometric mean", stored, read.mT.contiguous())


def _or_identity(weight: torch.Tensor | None, like: torch.Tensor) -> torch.Tensor:
    if weight is not None:
        return weight.to(like.device)
    return torch.eye(like.shape[-1], dtype=like.dtype, device=like.device).expand_as(like)
