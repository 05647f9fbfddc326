"""GGUF files of both architectures, made here with two layers, as checkpoints that transformers loads."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

gguf = pytest.importorskip("gguf")
transformers = pytest.importorskip("transformers")

HIDDEN, HEADS, KV_HEADS, LAYERS, WIDE = 64, 4, 2, 2, 96


def write_gguf(
    path: Path, architecture: str, pre: str = "", *, markers: bool = True, tied: bool = False
) -> dict[str, Any]:
    """A random model with a byte-level vocabulary; returns its tensors."""
    from tokenizers.pre_tokenizers import ByteLevel

    words = [*sorted(ByteLevel.alphabet()), "Ġa"]
    kinds = [1] * len(words)
    words += ["<|endoftext|>", *(["<|im_start|>", "<|im_end|>"] if markers else ["<a>", "<b>"]), "<tool>", "[PAD0]"]
    kinds += [3, 3, 3, 4, 5]
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_context_length(256)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(WIDE)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre or {"llama": "smollm"}.get(architecture, "qwen2"))
    writer.add_token_list(words)
    writer.add_token_types(kinds)
    writer.add_token_merges(["Ġ a"])
    writer.add_bos_token_id(257)
    writer.add_eos_token_id(259)
    writer.add_pad_token_id(257)
    writer.add_chat_template("{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}")
    draw = np.random.default_rng(0)
    key_rows = HIDDEN // HEADS * KV_HEADS
    shapes = {"token_embd.weight": (len(words), HIDDEN), "output_norm.weight": (HIDDEN,)}
    if not tied:
        shapes["output.weight"] = (len(words), HIDDEN)
    for i in range(LAYERS):
        layer = {
            "attn_norm": (HIDDEN,),
            "ffn_norm": (HIDDEN,),
            "attn_q": (HIDDEN, HIDDEN),
            "attn_k": (key_rows, HIDDEN),
        }
        layer |= {"attn_v": (key_rows, HIDDEN), "attn_output": (HIDDEN, HIDDEN), "ffn_gate": (WIDE, HIDDEN)}
        layer |= {"ffn_up": (WIDE, HIDDEN), "ffn_down": (HIDDEN, WIDE)}
        shapes |= {f"blk.{i}.{name}.weight": shape for name, shape in layer.items()}
        if architecture == "qwen2":
            biases = {"attn_q": (HIDDEN,), "attn_k": (key_rows,), "attn_v": (key_rows,)}
            shapes |= {f"blk.{i}.{name}.bias": shape for name, shape in biases.items()}
    tensors = {name: draw.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return tensors


@pytest.mark.parametrize("tied", [False, True], ids=["own output", "tied output"])
@pytest.mark.parametrize("architecture", ["llama", "qwen2"])
def test_every_weight_arrives(architecture: str, tied: bool, tmp_path: Path) -> None:
    from oscar_vllm.demo.gguf_checkpoint import write_checkpoint

    tensors = write_gguf(tmp_path / "model.gguf", architecture, tied=tied)
    write_checkpoint(tmp_path / "model.gguf", tmp_path / "model")
    model, loading = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert type(model).__name__ == {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}[architecture]
    loaded = {name: value.float().numpy() for name, value in model.state_dict().items()}
    attention = "model.layers.1.self_attn"
    tolerance: dict[str, Any] = {"rtol": 2**-8, "atol": 0}
    np.testing.assert_allclose(loaded[f"{attention}.v_proj.weight"], tensors["blk.1.attn_v.weight"], **tolerance)
    query = tensors["blk.1.attn_q.weight"]
    if architecture == "llama":  # GGUF keeps the pairs of rotary embedding side by side
        query = query.reshape(HEADS, -1, 2, HIDDEN).transpose(0, 2, 1, 3).reshape(HIDDEN, HIDDEN)
    else:
        np.testing.assert_allclose(loaded[f"{attention}.k_proj.bias"], tensors["blk.1.attn_k.bias"], **tolerance)
    np.testing.assert_allclose(loaded[f"{attention}.q_proj.weight"], query, **tolerance)
    output = tensors["token_embd.weight" if tied else "output.weight"]
    np.testing.assert_allclose(loaded["lm_head.weight"], output, **tolerance)


@pytest.mark.parametrize(
    ("architecture", "digits", "composed"),
    [("llama", ["2", "0"], "e\u0301"), ("qwen2", ["2", "0"], "é")],
)
def test_the_tokenizer_cuts_as_the_models_own(
    architecture: str, digits: list[str], composed: str, tmp_path: Path
) -> None:
    from oscar_vllm.demo.gguf_checkpoint import write_checkpoint

    write_gguf(tmp_path / "model.gguf", architecture)
    write_checkpoint(tmp_path / "model.gguf", tmp_path / "model")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "model")
    assert tokenizer.tokenize("20") == digits
    assert tokenizer.tokenize(" a") == ["Ġa"]
    assert tokenizer.decode(tokenizer.encode("e\u0301")) == composed
    assert tokenizer.encode("<|im_end|>") == [tokenizer.eos_token_id] == [259]
    assert tokenizer.encode("<tool>") == [260]
    assert "[PAD0]" not in tokenizer.get_vocab()
    assert tokenizer.decode(tokenizer.encode("<tool><|im_end|>"), skip_special_tokens=True) == "<tool>"
    chat = tokenizer.apply_chat_template([{"role": "user", "content": "x"}], tokenize=False)
    assert chat == "<|im_start|>x<|im_end|>"
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert config["vocab_size"] == 262


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"architecture": "gemma"}, "is not a Llama or Qwen2 model"),
        ({"architecture": "qwen2", "pre": "tekken"}, 'The pre-tokenizer "tekken" is not one'),
        ({"architecture": "llama", "markers": False}, r"does not know the chat marker <\|im_start\|>"),
    ],
)
def test_other_files_are_refused(options: dict[str, Any], message: str, tmp_path: Path) -> None:
    from oscar_vllm.demo.gguf_checkpoint import write_checkpoint

    write_gguf(tmp_path / "model.gguf", **options)
    with pytest.raises(ValueError, match=message):
        write_checkpoint(tmp_path / "model.gguf", tmp_path / "model")
