"""How many greedy answers change when nothing but the way they are computed does: with OSCAR's cache and the stock one.

    python examples/same_answers.py MODEL [--prompts 64] [--tokens 64] [--chunk 2048] [--json answers.json]

The same chat prompts of 24 to 2,600 tokens go through engines that differ in one thing (graphs, model runner, prefix
caching, speculation), and through one engine alone, together and again. A 16-bit cache does not repeat itself either:
batches of other shapes round otherwise, and one token that changes takes the rest of an answer along. Printed for every
pair: answers that differ anywhere, and how often answers part, per 100 tokens before they do. Each engine starts in a
process of its own; on a CPU there are neither graphs nor a second runner, and those pairs are left out.
"""

import argparse
import json
import multiprocessing
import os
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

Answers = list[list[int]]
LENGTHS = (24, 60, 150, 350, 600, 900, 1500, 2600)
ASKED = (
    "Explain in detail what the text above is about.",
    "Write a Python function that does something useful with this text.",
    "Repeat the text above word for word.",
    "Write a short story that begins with the text above.",
)
NGRAM = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 4}
ENGINES: dict[str, dict[str, Any]] = {
    "plain": {},
    "eager": {"enforce_eager": True},
    "V1": {},
    "cached": {"enable_prefix_caching": True},
    "ngram": {"speculative_config": NGRAM},
}
GPU_ONLY = ("eager", "V1")
PAIRS = {
    "full graphs / eager": (("plain", "together"), ("eager", "together")),
    "model runner V2 / V1": (("plain", "together"), ("V1", "together")),
    "together / alone": (("plain", "together"), ("plain", "alone")),
    "together / again": (("plain", "together"), ("plain", "again")),
    "prefix caching off / on, cold": (("plain", "together"), ("cached", "together")),
    "prefix caching off / on, hits": (("plain", "together"), ("cached", "again")),
    "no speculation / ngram, together": (("plain", "together"), ("ngram", "together")),
    "no speculation / ngram, alone": (("plain", "alone"), ("ngram", "alone")),
}


def answer(
    model: str, backend: str, name: str, count: int, tokens: int, longest: int, chunk: int | None
) -> dict[str, Answers]:
    """Token ids of all answers of one engine, by run; in a process of its own."""
    from vllm import SamplingParams
    from vllm.platforms import current_platform

    from oscar_vllm.calibration.text import default_text, held_out_text
    from oscar_vllm.engine import cpu_options, engine

    options: dict[str, Any] = {"enable_prefix_caching": False, "max_num_batched_tokens": chunk}
    if current_platform.is_cpu():
        options |= cpu_options() | {"enforce_eager": True}
    else:
        os.environ["VLLM_USE_V2_MODEL_RUNNER"] = str(int(name != "V1"))
        options["compilation_config"] = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY"}
    if backend == "OSCAR":
        options["attention_backend"] = "OSCAR"
    with engine(model, max_model_len=longest + tokens + 256, **(options | ENGINES[name])) as llm:
        tokenizer = llm.get_tokenizer()
        text = tokenizer.encode(held_out_text() + default_text())
        chats = []
        lengths = [length for length in LENGTHS if length <= longest]
        for i in range(count):
            start = i * 1531 % (len(text) - longest)
            piece = tokenizer.decode(text[start : start + lengths[i % len(lengths)]])
            chats.append([{"role": "user", "content": f"{piece}\n\n{ASKED[i % len(ASKED)]}"}])
        params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)

        def run(some: list[Any]) -> Answers:
            return [list(o.outputs[0].token_ids) for o in llm.chat(some, params, use_tqdm=False)]

        runs = {"together": run(chats), "again": run(chats)}
        if name in ("plain", "ngram"):
            runs["alone"] = [run([chat])[0] for chat in chats]
        return runs


def parted(one: Answers, other: Answers) -> tuple[float, float]:
    """(share of answers that differ in %, partings per 100 tokens)."""
    firsts = [next((i for i, pair in enumerate(zip(a, b, strict=True)) if pair[0] != pair[1]), None)
              for a, b in zip(one, other, strict=True)]  # fmt: skip
    differ = sum(first is not None for first in firsts)
    seen = sum(len(a) if first is None else first + 1 for a, first in zip(one, firsts, strict=True))
    return 100 * differ / len(one), 100 * differ / seen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--backends", nargs="+", default=["OSCAR", "stock"], choices=["OSCAR", "stock"])
    parser.add_argument("--engines", nargs="+", default=list(ENGINES), choices=list(ENGINES))
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=64, help="of each answer")
    parser.add_argument("--longest", type=int, default=max(LENGTHS), help="tokens of the longest text in a prompt")
    parser.add_argument("--chunk", type=int, help="most tokens of a step, where prompts are cut; vLLM's own by default")
    parser.add_argument("--json", type=Path, help="also write all answers")
    arguments = parser.parse_args()
    import torch

    names = [name for name in arguments.engines if torch.cuda.is_available() or name not in GPU_ONLY]
    found: dict[str, dict[str, dict[str, Answers]]] = {}
    for backend in arguments.backends:
        for name in names:
            print(f"{backend}, {name}: {arguments.prompts} prompts", flush=True)
            with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as process:
                given = (arguments.model, backend, name, arguments.prompts, arguments.tokens, arguments.longest,
                         arguments.chunk)  # fmt: skip
                found.setdefault(backend, {})[name] = process.submit(answer, *given).result()
            if arguments.json:
                arguments.json.write_text(json.dumps(found))
    print(f"\n{'answers that differ, % (partings per 100 tokens)':50}" + "".join(f"{b:>16}" for b in found))
    for title, ((one, run), (other, other_run)) in PAIRS.items():
        if one in names and other in names:
            cells = [parted(found[b][one][run], found[b][other][other_run]) for b in found]
            print(f"{title:50}" + "".join(f"{f'{share:.1f} ({rate:.2f})':>16}" for share, rate in cells))


if __name__ == "__main__":
    main()
