"""Recipes of one model side by side: the divergence of the served cache from the stock one, over the same texts.

    python examples/compare_recipes.py MODEL a.safetensors b.safetensors hadamard

Five held-out texts of 2,048 tokens, prefilled in chunks of 64, positions behind the first 320: one engine records the
stock backend's logits, another serves every recipe in turn. Two CPU cores take about a minute a recipe for a model of
135 million parameters.
"""

import sys
import tempfile
from pathlib import Path

from transformers import AutoTokenizer

from oscar_vllm.calibration.text import held_out_text
from oscar_vllm.evaluation.served import compare, record, teacher_forcing, use_recipe

TEXTS, LENGTH, CHUNK, SKIP = 5, 2048, 64, 320


def main(model: str, recipes: list[str]) -> None:
    """Print KL, its standard error, top-1 agreement and NLL of every recipe."""
    ids = AutoTokenizer.from_pretrained(model).encode(held_out_text())
    prompts = [ids[i * LENGTH : (i + 1) * LENGTH] for i in range(TEXTS)]
    oscar = {"attention_backend": "OSCAR", "additional_config": {"oscar": {"recipe": "hadamard"}}}
    with tempfile.TemporaryDirectory(prefix="oscar-compare-") as folder:
        with teacher_forcing(model, longest=LENGTH, chunk=CHUNK) as llm:
            record(llm, prompts, Path(folder), skip=SKIP, chunk=CHUNK)
        with teacher_forcing(model, longest=LENGTH, chunk=CHUNK, **oscar) as llm:
            for recipe in recipes:
                use_recipe(llm, recipe)
                found = compare(llm, prompts, Path(folder), skip=SKIP, chunk=CHUNK)
                print(
                    f"{recipe}: KL {found.kl:.4f} ± {found.kl_error:.4f}, top-1 {found.top1:.3f}, NLL {found.nll:.3f} "
                    f"(stock {found.reference_nll:.3f}), {found.positions:,} positions",
                    flush=True,
                )


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
