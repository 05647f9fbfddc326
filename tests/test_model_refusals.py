"""Models that the backend cannot serve, refused before they are loaded, in one sentence that says what to do."""

from pathlib import Path
from typing import Any

import pytest
from refused import refusal
from tiny_model import LLAMA, write_config

from oscar_vllm.backend.checks import UnsupportedByOscarError

pytestmark = pytest.mark.usefixtures("no_recipe_and_no_subprocess")


def gemma(**changes: Any) -> dict[str, Any]:
    fields = {"query_pre_attn_scalar": 64, "sliding_window": 128, "hidden_activation": "gelu_pytorch_tanh"}
    return fields | changes


def without(problem: str) -> str:
    return f"OSCAR does not serve {problem}: start {{model}} without --attention-backend OSCAR"


SLIDING = without("a model with sliding-window layers")
SOFT_CAP = without("a model with a soft cap on its attention logits")
ALIBI = without("a model with alibi position biases")
STATE = without("a model with state-space or linear-attention layers")

MODELS: dict[str, tuple[str, str, dict[str, Any], str]] = {
    "MLA": (
        "DeepseekV2ForCausalLM",
        "deepseek_v2",
        {
            "kv_lora_rank": 64,
            "q_lora_rank": None,
            "qk_nope_head_dim": 64,
            "qk_rope_head_dim": 32,
            "v_head_dim": 64,
            "head_dim": 32,
            "num_key_value_heads": 4,
        },
        without("a model with multi-head latent attention (MLA)"),
    ),
    "sliding window": ("MistralForCausalLM", "mistral", {"sliding_window": 128}, SLIDING),
    "sliding window by layers": (
        "Gemma3ForCausalLM",
        "gemma3_text",
        gemma(layer_types=["sliding_attention", "full_attention"]),
        SLIDING,
    ),
    "sliding window switched on": (
        "Qwen2ForCausalLM",
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 128, "max_window_layers": 1},
        SLIDING,
    ),
    "chunked attention": (
        "Llama4ForCausalLM",
        "llama4_text",
        {"attention_chunk_size": 128, "num_local_experts": 2, "intermediate_size_mlp": 512},
        SLIDING,
    ),
    "soft cap": (
        "Gemma2ForCausalLM",
        "gemma2",
        gemma(attn_logit_softcapping=50.0, layer_types=["full_attention"] * 2),
        SOFT_CAP,
    ),
    "alibi always": (
        "BloomForCausalLM",
        "bloom",
        {"n_head": 4, "n_layer": 2, "head_dim": "absent", "num_key_value_heads": "absent"},
        ALIBI,
    ),
    "alibi by choice": (
        "FalconForCausalLM",
        "falcon",
        {"alibi": True, "head_dim": "absent", "num_key_value_heads": "absent"},
        ALIBI,
    ),
    "attention sinks": (
        "GptOssForCausalLM",
        "gpt_oss",
        {"layer_types": ["full_attention"] * 2, "num_local_experts": 2, "num_experts_per_tok": 1},
        without("a model with attention sinks of its own"),
    ),
    "encoder": ("BertModel", "bert", {"hidden_act": "gelu"}, without("an encoder model")),
    "encoder-decoder": (
        "WhisperForConditionalGeneration",
        "whisper",
        {
            "d_model": 256,
            "encoder_layers": 2,
            "decoder_layers": 2,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "max_source_positions": 100,
            "max_target_positions": 128,
            "num_mel_bins": 8,
        },
        without("an encoder-decoder model"),
    ),
    "shared keys and values": (
        "Gemma3nForCausalLM",
        "gemma3n_text",
        {"layer_types": ["full_attention"] * 2, "num_kv_shared_layers": 1, "vocab_size_per_layer_input": 128},
        without("a model whose layers share keys and values"),
    ),
    "image tokens in both directions": (
        "PaliGemmaForConditionalGeneration",
        "paligemma",
        {
            "text_config": LLAMA | {"model_type": "gemma"},
            "vision_config": {"model_type": "siglip_vision_model", "hidden_size": 64, "num_attention_heads": 2},
        },
        without("a model whose image tokens attend in both directions"),
    ),
    "linear attention": (
        "Qwen3NextForCausalLM",
        "qwen3_next",
        {"layer_types": ["linear_attention", "full_attention"], "num_experts": 2, "num_experts_per_tok": 1},
        STATE,
    ),
    "state space": ("MambaForCausalLM", "mamba", {"state_size": 16, "expand": 2}, STATE),
    "state space and attention": (
        "JambaForCausalLM",
        "jamba",
        {"attn_layer_period": 2, "attn_layer_offset": 1, "num_experts": 1, "num_experts_per_tok": 1},
        STATE,
    ),
}


@pytest.mark.parametrize(("architecture", "model_type", "fields", "sentence"), MODELS.values(), ids=MODELS)
def test_models(tmp_path: Path, architecture: str, model_type: str, fields: dict[str, Any], sentence: str) -> None:
    path = str(write_config(tmp_path, architectures=[architecture], model_type=model_type, **fields))
    assert refusal(UnsupportedByOscarError, path) == sentence.format(model=path)


@pytest.mark.parametrize(
    ("head_dim", "size"), [(80, 80), (32, 32), (512, 512), ("absent", 96)], ids=["80", "32", "512", "from the heads"]
)
def test_head_sizes(tmp_path: Path, head_dim: Any, size: int) -> None:
    path = str(write_config(tmp_path, head_dim=head_dim, hidden_size=384))
    assert refusal(UnsupportedByOscarError, path) == (
        f"OSCAR serves head sizes 64, 128, 256 and {path} has {size}: start it without --attention-backend OSCAR"
    )
