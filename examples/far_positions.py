"""How far on a recipe holds: one text as if it stood at several positions, without a long prompt before it.

    python examples/far_positions.py MODEL a.safetensors [b.safetensors ...] --positions 0 8000 28000

A rotary embedding turns queries and keys by their position, so the exact model answers the same wherever a text stands;
what two bits make of its keys may differ. Reference maths (transformers, float32): KL and top-1 against the same model
without quantization, behind the first 320 tokens, with the first 64 and the last 256 of what a token sees exact. Half a
minute a line on two CPU cores, with 1,200 tokens and 1.5 billion parameters.
"""

import argparse
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from oscar_vllm.calibration.text import held_out_text
from oscar_vllm.evaluation.divergence import Quality, compare_rows
from oscar_vllm.evaluation.reference_attention import Attention, attending
from oscar_vllm.kernels.write.reference import dequantize, quantize, transform_rows
from oscar_vllm.recipe import OscarRecipe

SINK, RECENT, SKIP, ROWS = 64, 256, 320, 512


def restored(rows: torch.Tensor, stored: Any, back: Any, mean: Any, clip: Any, gain: Any, r: Any) -> torch.Tensor:
    """Rows [H, T, D] as the history gives them back."""
    found = quantize(transform_rows(rows.transpose(0, 1), stored, mean), clip, gain, r.rounds, moments=r.moments)
    return torch.bmm(dequantize(*found).transpose(0, 1), back) + mean[:, None]


def two_bit_attention(recipe: OscarRecipe) -> Attention:
    """Causal attention that reads what lies between the windows of each query in two bits."""

    def attend(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, scale: float, layer: int) -> torch.Tensor:
        r = recipe.layer(layer)
        far_key = restored(key, r.key, r.query.mT, r.key_mean, r.key_clip, r.key_gain, r)
        far_value = restored(value, r.value, r.output, r.value_mean, r.value_clip, r.value_gain, r)
        at = torch.arange(key.shape[1])
        causal, history = at <= at[:, None], (at >= SINK) & (at <= at[:, None] - RECENT)
        heads = []
        for head, q in enumerate(query):
            kv = head * len(key) // len(query)
            scores = torch.where(history, q @ far_key[kv].T, q @ key[kv].T) * scale
            weights = scores.masked_fill(~causal, -torch.inf).softmax(-1)
            heads.append(weights @ value[kv] + (weights * history) @ (far_value[kv] - value[kv]))
        return torch.stack(heads)

    return attend


@torch.inference_mode()
def quality(network: Any, recipe: OscarRecipe, ids: torch.Tensor, first: int) -> Quality:
    """Distance of a recipe from the exact model, over the text ``ids`` [1, T] that begins at position ``first``."""

    def states() -> torch.Tensor:
        at = torch.arange(first, first + ids.shape[1])[None]
        hidden: torch.Tensor = network.model(ids, position_ids=at, use_cache=False).last_hidden_state[0]
        return hidden

    exact = states()
    with attending(network, two_bit_attention(recipe)):
        other = states()
    parts = []
    for start in range(SKIP, ids.shape[1] - 1, ROWS):
        end = min(start + ROWS, ids.shape[1] - 1)
        logits = (network.lm_head(hidden[start:end]) for hidden in (exact, other))
        parts.append(compare_rows(*logits, ids[0, start + 1 : end + 1]))
    return Quality.of(parts)


def main() -> None:
    """Print KL and top-1 of every recipe at every position."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("recipes", type=Path, nargs="+")
    parser.add_argument("--positions", type=int, nargs="+", default=[0, 8000, 28000])
    parser.add_argument("--tokens", type=int, default=1200)
    arguments = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(arguments.model, model_max_length=1 << 30)
    ids = torch.tensor([tokenizer.encode(held_out_text())[: arguments.tokens]])
    network: Any = AutoModelForCausalLM.from_pretrained(arguments.model, dtype=torch.float32).eval()
    for first in arguments.positions:
        for file in arguments.recipes:
            found = quality(network, OscarRecipe.load(file), ids, first)
            print(
                f"{file} at position {first:,}: KL {found.kl:.4f} ± {found.kl_error:.4f}, top-1 {found.top1:.3f}, "
                f"{found.positions:,} positions",
                flush=True,
            )


if __name__ == "__main__":
    main()
