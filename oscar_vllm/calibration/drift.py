"""Keys far on: what a rotary embedding makes of the keys' mean, where a calibration text never gets to.

A key bias of hundreds (Qwen2.5 has them, in the channels that turn slowest) is nearly constant over the 2,048 positions
of a calibration prompt, and a mean takes it off. At position 30,000 it has turned away from that mean by many times the
spread of the keys. (Qwen2.5-Coder-1.5B, layer 0: by 160 times their energy.)
"""

import dataclasses
from collections.abc import Sequence

import torch

from oscar_vllm.calibration.rotary import Rotary
from oscar_vllm.calibration.sample import AttentionSample, sink_tokens

POINTS = 257
"""Positions that the way of the mean is followed at."""
SPREAD_POINTS = 33
"""Positions that a covariance is averaged over."""
SPREAD_SHARE = 0.75
"""Of that average in the covariance that transforms are made from. (Reference maths, KL. SmolLM2-135M at position 0 and
6,500 with half, three quarters and all of it: 0.0033 and 0.0091, 0.0035 and 0.0076, 0.0037 and 0.0067; without any of
this 0.0031 and 0.0293. Qwen2.5-Coder-1.5B at 0, 8,000 and 28,000 with three quarters and all of it: 0.0021, 0.0026 and
0.0027; 0.0024, 0.0031 and 0.0031; without 0.0026, 0.0043 and 1.39. Standard errors up to 0.0006.)"""


def drift(samples: Sequence[AttentionSample], rotary: Rotary, mean: torch.Tensor) -> torch.Tensor:
    """What keys have on top of the ``mean`` that is subtracted, over the positions that the model was made for.

    Args:
        samples: of one layer, each a prompt from position 0.
        rotary: of the layer.
        mean: [H, D]

    Returns:
        [H, POINTS, D] float64.
    """
    origin, tokens = torch.zeros_like(mean, dtype=torch.float64), 0
    for sample in samples:
        length = sample.key.shape[1]
        keys = rotary.turn(sample.key, -torch.arange(length))[:, sink_tokens(length) :]
        origin += keys.sum(1).to(origin)
        tokens += keys.shape[1]
    way = torch.linspace(0, rotary.positions - 1, POINTS, dtype=torch.float64)
    return rotary.turn((origin / tokens)[:, None].expand(-1, POINTS, -1), way) - mean.double()[:, None]


def spread_covariance(covariance: torch.Tensor, rotary: Rotary) -> torch.Tensor:
    """A covariance [H, D, D] of queries or keys, blended with its average over the model's positions; float64.

    A transform amplifies the directions that vary little, and further on other directions are those.
    """
    turned = torch.zeros_like(covariance, dtype=torch.float64)
    for position in torch.linspace(0, rotary.positions - 1, SPREAD_POINTS, dtype=torch.float64):
        turned += rotary.turn(rotary.turn(covariance, position[None]).mT, position[None])
    return torch.lerp(covariance.double(), turned / SPREAD_POINTS, SPREAD_SHARE)


def spread_out(samples: Sequence[AttentionSample], rotary: Rotary) -> list[AttentionSample]:
    """The samples as if they stood at even distances over the positions that the model was made for.

    Queries and keys turn alike, so their attention stays what it is; what quantization makes of them does not.
    """
    moved = []
    for number, sample in enumerate(samples):
        room = max(rotary.positions - sample.key.shape[1], 0)
        start = torch.full((1,), room * number / max(len(samples) - 1, 1))
        query, key = (rotary.turn(rows, start).to(rows.dtype) for rows in (sample.query, sample.key))
        moved.append(dataclasses.replace(sample, query=query, key=key))
    return moved
