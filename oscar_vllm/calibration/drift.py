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
