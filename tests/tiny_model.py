"""A tiny Llama: configuration, geometry, and a checkpoint of random weights that an engine serves in seconds."""

import json
from pathlib import Path
from typing import Any

from oscar_vllm.geometry import ModelGeometry

LLAMA: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "vocab_size": 128,
    "max_position_embeddings": 2048,
    "dtype": "bfloat16",
}
GEOMETRY = ModelGeometry(
    model_type="llama",
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_size=64,
    hidden_size=256,
    rope_type="default",
    rope_theta=10000.0,
)


def write_config(folder: Path, **changes: Any) -> Path:
    """The folder, with a ``config.json`` of the tiny Llama with changed fields ("absent": left out)."""
    folder.mkdir(parents=True, exist_ok=True)
    fields = {name: value for name, value in (LLAMA | changes).items() if value != "absent"}
    (folder / "config.json").write_text(json.dumps(fields))
    return folder


def write_checkpoint(folder: Path, **changes: Any) -> Path:
    """The folder, with configuration and random weights large enough that attention is not flat."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(**(LLAMA | changes), initializer_range=0.1, bos_token_id=0, eos_token_id=1)
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    return folder


def write_tokenizer(folder: Path) -> Path:
    """The folder, with a tokenizer beside its checkpoint: one token an ASCII character."""
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokenizer = Tokenizer(models.WordLevel({chr(i): i for i in range(LLAMA["vocab_size"])}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="?").save_pretrained(folder)
    return folder
