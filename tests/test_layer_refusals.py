"""What a single layer asks for and the backend does not do, refused when the layer is built."""

from typing import Any

import pytest
import torch
from vllm.v1.kv_cache_interface import FullAttentionSpec, SlidingWindowSpec

from oscar_vllm.backend.attention import OscarImpl
from oscar_vllm.cache.layout import PageLayout
from oscar_vllm.cache.spec import history_spec
from oscar_vllm.cache.window import window_spec


@pytest.mark.parametrize(
    ("options", "feature"),
    [
        pytest.param({"alibi_slopes": [0.5, 0.25]}, "alibi", id="alibi"),
        pytest.param({"sliding_window": 4096}, "sliding-window", id="sliding-window"),
        pytest.param({"logits_soft_cap": 30.0}, "logit soft-cap", id="soft-cap"),
        pytest.param({"attn_type": "encoder_only"}, "encoder_only attention", id="encoder"),
        pytest.param({"kv_sharing_target_layer_name": "model.layers.0"}, "shared-KV", id="shared-kv"),
        pytest.param({"sinks": torch.zeros(2)}, "attention-sink", id="sinks"),
        pytest.param({"rotary_of_tomorrow": 1}, "rotary_of_tomorrow", id="unknown-option"),
    ],
)
def test_layer_features(options: dict[str, Any], feature: str) -> None:
    with pytest.raises(ValueError, match="OSCAR does not serve") as caught:
        OscarImpl(2, 64, 0.125, 2, **options)
    assert str(caught.value) == (f"OSCAR does not serve {feature} layers; use another attention backend for this model")


def test_history_takes_full_attention_only() -> None:
    shape: dict[str, Any] = {"block_size": 128, "num_kv_heads": 2, "head_size": 64, "dtype": torch.bfloat16}
    spec = history_spec(FullAttentionSpec(**shape))
    assert spec.page_size_bytes == 2 * PageLayout(64).page_bytes
    assert history_spec(spec) is spec
    with pytest.raises(ValueError, match="full-attention layers only and this model has a SlidingWindowSpec layer"):
        history_spec(SlidingWindowSpec(**shape, sliding_window=256))


def test_window_keeps_16_bit_floats() -> None:
    options = {"num_kv_heads": 2, "head_size": 64, "sink": 64, "recent": 256, "lookahead": 0, "steps_in_flight": 1}
    for dtype in (torch.bfloat16, torch.float16):
        assert window_spec(dtype=dtype, **options).page_size_bytes == 2 * PageLayout(64).page_bytes
    with pytest.raises(ValueError, match=r"--dtype bfloat16"):
        window_spec(dtype=torch.float32, **options)
