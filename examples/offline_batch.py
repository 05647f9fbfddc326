"""Offline batch: many prompts behind one long shared document, greedy, with the 2-bit cache.

    python examples/offline_batch.py [MODEL] [DOCUMENT]

Without MODEL it takes SmolLM2-135M-Instruct, without DOCUMENT a text that ships. A recipe is calibrated on first use.
"""

import sys
from pathlib import Path

from vllm import SamplingParams

from oscar_vllm.backend.recipes import cached_recipe_path
from oscar_vllm.calibration.run import calibrate
from oscar_vllm.calibration.text import default_text, held_out_text
from oscar_vllm.demo.model import ensure_demo_model
from oscar_vllm.engine import cpu_options, engine
from oscar_vllm.geometry import ModelGeometry

QUESTIONS = [
    "Summarize the text in one sentence.",
    "Which programming language is it about?",
    "Name one function in it.",
]
DOCUMENT_TOKENS = 1_500


def main() -> None:
    from vllm.transformers_utils.config import get_config

    model = sys.argv[1] if len(sys.argv) > 1 else str(ensure_demo_model(print))
    document = Path(sys.argv[2]).read_text() if len(sys.argv) > 2 else held_out_text()
    geometry = ModelGeometry.from_hf_config(get_config(model, trust_remote_code=False))
    if not cached_recipe_path(model, geometry).is_file():
        print("calibrating", model)
        calibrate(model, text=default_text())
    with engine(model, attention_backend="OSCAR", max_model_len=2_048, **cpu_options()) as llm:
        tokenizer = llm.get_tokenizer()
        shared = tokenizer.decode(tokenizer.encode(document)[:DOCUMENT_TOKENS])
        chats = [[{"role": "user", "content": f"{shared}\n\n{question}"}] for question in QUESTIONS]
        for question, output in zip(
            QUESTIONS, llm.chat(chats, SamplingParams(temperature=0.0, max_tokens=48)), strict=True
        ):
            print(f"\n{question}  [{output.num_cached_tokens} of {len(output.prompt_token_ids)} tokens cached]")
            print(output.outputs[0].text.strip())


if __name__ == "__main__":
    main()
