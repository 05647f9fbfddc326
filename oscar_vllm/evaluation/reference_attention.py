"""Caches in reference maths: a transformers model whose attention is another function."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

Attention = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, int], torch.Tensor]
"""Takes query [H, T, D], key and value [H_kv, T, D], the softmax scale and the layer's index; returns [H, T, D]."""
_NAME = "oscar_reference_maths"


@contextmanager
def attending(network: Any, attend: Attention) -> Iterator[None]:
    """Let a transformers model attend with ``attend``, one sequence at a time."""
    from transformers import AttentionInterface

    def interface(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, scaling: float, **_: Any
    ) -> tuple[torch.Tensor, None]:
        return attend(query[0], key[0], value[0], scaling, module.layer_idx).transpose(0, 1)[None], None

    AttentionInterface.register(_NAME, interface)
    before = network.config._attn_implementation
    network.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        network.set_attn_implementation(before)
