"""A GGUF file of the Llama or Qwen2 architecture, written as an ordinary bfloat16 checkpoint with its tokenizer.

The file's own reader and dequantizer (package ``gguf``) and the plain file formats are used instead of a general
loader: the result then depends on no loader's version, and what such loaders tend to lose (the digit splitting of the
tokenizer, special tokens, end-of-text ids, the chat template) is written and checked here.
"""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from oscar_vllm.demo.gguf_tokenizer import special_ids, write_json, write_tokenizer

_TENSORS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_BLOCK_TENSORS = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_ARCHITECTURES: dict[str, dict[str, Any]] = {
    "llama": {"architectures": ["LlamaForCausalLM"], "attention_bias": False, "mlp_bias": False},
    "qwen2": {"architectures": ["Qwen2ForCausalLM"], "use_sliding_window": False},
}
"""What ``config.json`` says beside the sizes."""


def write_checkpoint(gguf_file: Path, folder: Path) -> None:
    """Write ``config.json``, ``generation_config.json``, ``model.safetensors`` (bfloat16) and the tokenizer's files.

    Raises:
        ValueError: the file is not a Llama or Qwen2 model with a byte-level BPE tokenizer and chat markers.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    architecture = meta["general.architecture"]
    if architecture not in _ARCHITECTURES or meta["tokenizer.ggml.model"] != "gpt2":
        raise ValueError(
            f"{gguf_file.name} is not a Llama or Qwen2 model with a byte-level BPE tokenizer; use another file."
        )
    sizes = {name.removeprefix(f"{architecture}."): value for name, value in meta.items()}
    folder.mkdir(parents=True)
    # Llama's query and key rows are the only ones that GGUF reorders.
    heads = (sizes["attention.head_count"], sizes["attention.head_count_kv"]) if architecture == "llama" else None
    tensors = _read_tensors(reader, heads)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it the owner's alone
    vocabulary = tensors["model.embed_tokens.weight"].shape[0]
    tied = "lm_head.weight" not in tensors
    ids = special_ids(meta)
    fixed = {"model_type": architecture, **_ARCHITECTURES[architecture], **ids}
    write_json(folder / "config.json", fixed | _sizes(sizes, vocabulary, tied))
    write_json(folder / "generation_config.json", ids)
    write_tokenizer(meta, sizes["context_length"], folder)


def _read_tensors(reader: Any, interleaved_heads: tuple[int, int] | None) -> dict[str, torch.Tensor]:
    """All tensors under their names in a checkpoint, dequantized in parallel."""
    from gguf.quants import dequantize

    def read(tensor: Any) -> tuple[str, torch.Tensor]:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        stem, _, kind = tensor.name.rpartition(".")
        if not stem.startswith("blk."):
            return f"{_TENSORS[stem]}.{kind}", weight.to(torch.bfloat16).contiguous()
        _, layer, part = stem.split(".")
        if interleaved_heads and part in ("attn_q", "attn_k"):
            weight = _rotate_half_order(weight, interleaved_heads[part == "attn_k"])
        return f"model.layers.{layer}.{_BLOCK_TENSORS[part]}.{kind}", weight.to(torch.bfloat16).contiguous()

    with ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:  # the array operations run outside Python's lock
        return dict(pool.map(read, reader.tensors))


def _rotate_half_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF interleaves the two halves of a head that rotary embedding pairs; checkpoints keep them apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _sizes(sizes: dict[str, Any], vocabulary: int, tied: bool) -> dict[str, Any]:
    heads = sizes["attention.head_count"]
    theta = float(sizes["rope.freq_base"])
    return {
        "hidden_act": "silu",
        "hidden_size": sizes["embedding_length"],
        "intermediate_size": sizes["feed_forward_length"],
        "num_hidden_layers": sizes["block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": sizes["attention.head_count_kv"],
        "head_dim": sizes["embedding_length"] // heads,
        "max_position_embeddings": sizes["context_length"],
        # GGUF keeps it as a float32
        "rms_norm_eps": round(float(sizes["attention.layer_norm_rms_epsilon"]), 10),
        "rope_theta": theta,  # where transformers 4 looks
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},  # where transformers 5 looks
        "tie_word_embeddings": tied,
        "vocab_size": vocabulary,
        "torch_dtype": "bfloat16",
        # Without a version transformers 5 takes every large byte-level tokenizer for a broken one of Mistral's.
        "transformers_version": "5.0.0",
    }
