"""The tokenizer inside a GGUF file, written as the files that transformers and vLLM read."""

import json
from pathlib import Path
from typing import Any

SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding"}
"""Hugging Face's names of special tokens and GGUF's."""
_CONTROL_TOKEN, _USER_TOKEN, _UNUSED_TOKEN = 3, 4, 5
_QWEN2_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How Qwen2's tokenizer cuts text into words (its ``tokenizer.json``)."""


def special_ids(meta: dict[str, Any]) -> dict[str, int]:
    """Ids of the special tokens under the names of ``config.json``."""
    return {f"{name}_token_id": int(meta[f"tokenizer.ggml.{key}_token_id"]) for name, key in SPECIAL.items()}


def write_tokenizer(meta: dict[str, Any], context: int, folder: Path) -> None:
    """Write ``tokenizer.json`` and ``tokenizer_config.json``, and check that they work.

    Args:
        meta: the GGUF file's fields.
        context: tokens that the model was made for.

    Raises:
        ValueError: a pre-tokenizer that is not known here, or a tokenizer without chat markers.
    """
    from tokenizers import AddedToken, Tokenizer, decoders, normalizers
    from tokenizers.models import BPE

    kinds = meta["tokenizer.ggml.token_type"]
    # Unused entries only pad the embedding to a round size.
    tokens = [(i, word, kind) for i, (word, kind) in enumerate(zip(meta["tokenizer.ggml.tokens"], kinds, strict=True))]
    tokens = [token for token in tokens if token[2] != _UNUSED_TOKEN]
    ids = {word: i for i, word, _ in tokens}
    merges = [tuple(pair.split(" ")) for pair in meta["tokenizer.ggml.merges"]]
    tokenizer = Tokenizer(BPE(vocab=ids, merges=merges))
    tokenizer.pre_tokenizer = _pre_tokenizer(meta["tokenizer.ggml.pre"])
    if meta["tokenizer.ggml.pre"] == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_tokens([AddedToken(word, normalized=False) for _, word, kind in tokens if kind == _USER_TOKEN])
    control = [AddedToken(word, normalized=False, special=True) for _, word, kind in tokens if kind == _CONTROL_TOKEN]
    tokenizer.add_special_tokens(control)
    for marker in ("<|im_start|>", "<|im_end|>"):
        if marker not in ids or tokenizer.encode(marker).ids != [ids[marker]]:
            raise ValueError(f"The tokenizer does not know the chat marker {marker}; use another file.")
    if tokenizer.decode(tokenizer.encode("Tab\there, 2048 é?").ids) != "Tab\there, 2048 é?":
        raise ValueError("The tokenizer does not give a text back as it was; use another file.")
    tokenizer.save(str(folder / "tokenizer.json"))
    words = {i: word for i, word, _ in tokens}
    names = {f"{name}_token": words[i] for name, i in zip(SPECIAL, special_ids(meta).values(), strict=True)}
    unknown = meta.get("tokenizer.ggml.unknown_token_id")
    write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "add_prefix_space": False,
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
            **({} if unknown is None else {"unk_token": words[int(unknown)]}),
            "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
            "chat_template": meta["tokenizer.chat_template"],
            **names,
        },
    )


def _pre_tokenizer(name: str) -> Any:
    """The pre-tokenizer that GGUF calls ``name``."""
    from tokenizers import Regex, pre_tokenizers

    if name == "smollm":  # every digit on its own, then GPT-2's byte-level words
        digits = pre_tokenizers.Digits(individual_digits=True)
        return pre_tokenizers.Sequence([digits, pre_tokenizers.ByteLevel(add_prefix_space=False)])
    if name == "qwen2":
        words = pre_tokenizers.Split(Regex(_QWEN2_WORDS), behavior="isolated")
        return pre_tokenizers.Sequence([words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    raise ValueError(f'The pre-tokenizer "{name}" is not one this converter knows; use another file.')


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Write a JSON file as checkpoints have them."""
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
