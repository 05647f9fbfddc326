"""Agents: many sessions behind one long system prompt with tools, many turns, with OSCAR and with the 16-bit cache.

    python examples/agent_workload.py [MODEL] [--sessions N] [--turns N] [--system-tokens N] [--json FILE]

Without MODEL it takes SmolLM2-135M-Instruct; a recipe is calibrated on first use. Every turn sends the whole
conversation again, as agents do: what the prefix cache holds of it is not computed again. Prints for each cache the hit
rate, the time to first token, the tokens a second and how many sessions of the final length fit into memory.
"""

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

from vllm import SamplingParams

from oscar_vllm.backend.recipes import cached_recipe_path
from oscar_vllm.cache.capacity import tokens_that_fit
from oscar_vllm.calibration.run import calibrate
from oscar_vllm.calibration.text import default_text, held_out_text
from oscar_vllm.config import OscarConfig
from oscar_vllm.demo.model import ensure_demo_model
from oscar_vllm.engine import cpu_options, engine
from oscar_vllm.geometry import ModelGeometry

ASKS = ["Which tool do you use first?", "Call it.", "What did it return?", "Is the task done?"]


def system_prompt(tokenizer: Any, tokens: int) -> str:
    """A description of tools, as long as agents' system prompts are."""
    tools = [
        {"name": f"tool_{i}", "description": text[:300], "parameters": {"type": "object", "required": ["query"]}}
        for i, text in enumerate(held_out_text().split("\n\n"))
        if text.strip()
    ]
    text = "You are an agent. Answer in one short sentence. Your tools:\n" + json.dumps(tools)
    return str(tokenizer.decode(tokenizer.encode(text)[:tokens]))


def sessions_that_fit(llm: Any, tokens: int, oscar: bool) -> int:
    """Sessions of ``tokens`` tokens that the cache holds at once."""
    config = llm.llm_engine.vllm_config
    blocks = config.cache_config.num_gpu_blocks
    if oscar:
        windows = OscarConfig.from_additional_config(config.additional_config)
        return tokens_that_fit(blocks, tokens, windows.sink, windows.recent) // tokens
    return int(blocks // -(-tokens // config.cache_config.block_size))


def run(
    model: str, sessions: int, turns: int, system_tokens: int, new_tokens: int, backend: str | None
) -> dict[str, Any]:
    """All sessions of one cache, a turn at a time."""
    limit = system_tokens + turns * (new_tokens + 64) + 64
    options = {"attention_backend": backend, "max_model_len": limit, "disable_log_stats": False}
    with engine(model, enable_prefix_caching=True, **options, **cpu_options()) as llm:
        system = {"role": "system", "content": system_prompt(llm.get_tokenizer(), system_tokens)}
        chats = [[system, {"role": "user", "content": f"You are agent {i}."}] for i in range(sessions)]
        prompt_tokens = cached = generated = 0
        first_tokens = []
        start = time.perf_counter()
        for turn in range(turns):
            for chat in chats:
                chat.append({"role": "user", "content": ASKS[turn % len(ASKS)]})
            params = SamplingParams(temperature=0.0, max_tokens=new_tokens, ignore_eos=True)
            for chat, output in zip(chats, llm.chat(chats, params, use_tqdm=False), strict=True):
                chat.append({"role": "assistant", "content": output.outputs[0].text})
                prompt_tokens += len(output.prompt_token_ids)
                cached += output.num_cached_tokens
                generated += len(output.outputs[0].token_ids)
                first_tokens.append(output.metrics.first_token_latency)
                length = len(output.prompt_token_ids) + len(output.outputs[0].token_ids)
            print(f"  turn {turn + 1} of {turns}: {length:,} tokens a session")
        elapsed = time.perf_counter() - start
        return {
            "cache": backend or "16-bit",
            "hit_rate": cached / prompt_tokens,
            "first_token_ms": 1000 * statistics.median(first_tokens),
            "tokens_per_s": generated / elapsed,
            "sessions_that_fit": sessions_that_fit(llm, length, backend is not None),
        }


def main() -> None:
    from vllm.transformers_utils.config import get_config

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--sessions", type=int, default=4)
    parser.add_argument("--turns", type=int, default=4)
    parser.add_argument("--system-tokens", type=int, default=1500)
    parser.add_argument("--new-tokens", type=int, default=24)
    parser.add_argument("--json", type=Path)
    arguments = parser.parse_args()
    model = arguments.model or str(ensure_demo_model(print))
    if not cached_recipe_path(
        model, ModelGeometry.from_hf_config(get_config(model, trust_remote_code=False))
    ).is_file():
        print("calibrating", model)
        calibrate(model, text=default_text())
    rows = []
    for backend in ("OSCAR", None):
        print(f"{arguments.sessions} sessions with {backend or 'the 16-bit cache'}")
        rows.append(
            run(model, arguments.sessions, arguments.turns, arguments.system_tokens, arguments.new_tokens, backend)
        )
    print(f"\n{'cache':8} {'hit rate':>9} {'first token':>12} {'tokens/s':>9} {'sessions that fit':>18}")
    for row in rows:
        print(
            f"{row['cache']:8} {row['hit_rate']:9.1%} {row['first_token_ms']:9.0f} ms {row['tokens_per_s']:9.1f} "
            f"{row['sessions_that_fit']:18,}"
        )
    if arguments.json:
        arguments.json.write_text(json.dumps(rows, indent=1))


if __name__ == "__main__":
    main()
