"""Which KV heads a rank takes its share of the recipe for."""

import pytest
import torch
from vllm.config import VllmConfig, set_current_vllm_config
from vllm.model_executor import parameter
from vllm.model_executor.layers import linear

from oscar_vllm.backend import ranks

ROWS, HEADS = 4, 24
"""Of a head's weight; query heads."""


@pytest.mark.parametrize(("kv_heads", "world"), [(2, 1), (2, 2), (8, 2), (6, 3), (1, 2), (2, 4), (2, 8), (4, 8)])
def test_a_rank_takes_the_kv_heads_whose_weights_vllm_gives_it(
    kv_heads: int, world: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of a head included, where ranks are more than heads."""
    weight = torch.arange(kv_heads).repeat_interleave(ROWS).float()[:, None].repeat(1, 16)  # of a head: its number
    for rank in range(world):
        for module in (linear, parameter, ranks):
            monkeypatch.setattr(module, "get_tensor_model_parallel_rank", lambda rank=rank: rank)
            monkeypatch.setattr(module, "get_tensor_model_parallel_world_size", lambda: world)
        with set_current_vllm_config(VllmConfig()):
            layer = linear.QKVParallelLinear(16, ROWS, HEADS, kv_heads, bias=False, params_dtype=torch.float32)
        layer.weight.data.fill_(-1)
        layer.weight.weight_loader(layer.weight, weight, "k")
        held = layer.weight[layer.num_heads * ROWS :][: layer.num_kv_heads * ROWS, 0].view(-1, ROWS)
        first = ranks.first_kv_head(kv_heads)
        assert held.tolist() == [[head] * ROWS for head in range(first, first + layer.num_kv_heads)]
