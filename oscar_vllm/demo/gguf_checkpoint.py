"""A GGUF file of the Llama architecture, written as an ordinary bfloat16 checkpoint with its tokenizer.

The file's own reader and dequantizer (package ``gguf``) and the plain file formats are used instead of a general
loader: the result then depends on no loader's version, and what such loaders tend to lose (the digit splitting of the
tokenizer, special tokens, end-of-text ids, the chat template) is written and checked here.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

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
_CONTROL_TOKEN = 3


def write_checkpoint(gguf_file: Path, folder: Path) -> None:
    """Write ``config.json``, ``generation_config.json``, ``model.safetensors`` (bfloat16) and the tokenizer's files.

    Raises:
        ValueError: the file is not a Llama model with a byte-level BPE tokenizer and chat markers.
    """
    from gguf import GGUFReader

    reader = GGUFReader(gguf_file)
    meta = {name: field.contents() for name, field in reader.fields.items()}
    if meta["general.architecture"] != "llama" or meta["tokenizer.ggml.model"] != "gpt2":
        raise ValueError(f"{gguf_file.name} is not a Llama model with a byte-level BPE tokenizer; use another file.")
    folder.mkdir(parents=True)
    tensors = _read_tensors(reader, meta["llama.attention.head_count"], meta["llama.attention.head_count_kv"])
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes it the owner's alone
    _write_json(folder / "config.json", _config(meta, tied="lm_head.weight" not in tensors))
    ids = _special_ids(meta)
    _write_json(folder / "generation_config.json", ids)
    _write_tokenizer(meta, folder)


def _read_tensors(reader: Any, query_heads: int, kv_heads: int) -> dict[str, torch.Tensor]:
    from gguf.quants import dequantize

    tensors = {}
    for tensor in reader.tensors:
        weight = torch.from_numpy(dequantize(tensor.data, tensor.tensor_type).copy())
        stem = tensor.name.removesuffix(".weight")
        if stem.startswith("blk."):
            _, layer, part = stem.split(".")
            if part in ("attn_q", "attn_k"):
                weight = _rotate_half_order(weight, query_heads if part == "attn_q" else kv_heads)
            name = f"model.layers.{layer}.{_BLOCK_TENSORS[part]}"
        else:
            name = _TENSORS[stem]
        tensors[f"{name}.weight"] = weight.to(torch.bfloat16).contiguous()
    return tensors


def _rotate_half_order(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """GGUF interleaves the two halves of a head that rotary embedding pairs; checkpoints keep them apart."""
    rows, columns = weight.shape
    return weight.reshape(heads, rows // heads // 2, 2, columns).transpose(1, 2).reshape(rows, columns)


def _special_ids(meta: dict[str, Any]) -> dict[str, int]:
    return {f"{name}_token_id": int(meta[f"tokenizer.ggml.{key}_token_id"]) for name, key in _SPECIAL.items()}


_SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}


def _config(meta: dict[str, Any], tied: bool) -> dict[str, Any]:
    heads = meta["llama.attention.head_count"]
    theta = float(meta["llama.rope.freq_base"])
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": meta["llama.embedding_length"],
        "intermediate_size": meta["llama.feed_forward_length"],
        "num_hidden_layers": meta["llama.block_count"],
        "num_attention_heads": heads,
        "num_key_value_heads": meta["llama.attention.head_count_kv"],
        "head_dim": meta["llama.embedding_length"] // heads,
        "max_position_embeddings": meta["llama.context_length"],
        # GGUF keeps it as a float32
        "rms_norm_eps": round(float(meta["llama.attention.layer_norm_rms_epsilon"]), 10),
        "rope_theta": theta,  # where transformers 4 looks
        "rope_parameters": {"rope_type": "default", "rope_theta": theta},  # where transformers 5 looks
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": tied,
        "vocab_size": meta["llama.vocab_size"],
        "torch_dtype": "bfloat16",
        **_special_ids(meta),
    }


def _write_tokenizer(meta: dict[str, Any], folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, pre_tokenizers
    from tokenizers.models import BPE

    words: list[str] = meta["tokenizer.ggml.tokens"]
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab={word: i for i, word in enumerate(words)}, merges=merges))
    # The pre-tokenizer that GGUF calls "smollm": every digit on its own, then GPT-2's byte-level words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    control = [
        word for word, kind in zip(words, meta["tokenizer.ggml.token_type"], strict=True) if kind == _CONTROL_TOKEN
    ]
    tokenizer.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in control])
    for marker in ("<|im_start|>", "<|im_end|>"):
        if tokenizer.encode(marker).ids != [words.index(marker)]:
            raise ValueError(f"The tokenizer does not know the chat marker {marker}; use another file.")
    if tokenizer.decode(tokenizer.encode("Tab\there, 2048 é?").ids) != "Tab\there, 2048 é?":
        raise ValueError("The tokenizer does not give a text back as it was; use another file.")
    tokenizer.save(str(folder / "tokenizer.json"))
    names = {f"{name}_token": words[i] for name, i in zip(_SPECIAL, _special_ids(meta).values(), strict=True)}
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": meta["llama.context_length"],
            "unk_token": words[int(meta["tokenizer.ggml.unknown_token_id"])],
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "chat_template": meta["tokenizer.chat_template"],
            **names,
        },
    )


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
