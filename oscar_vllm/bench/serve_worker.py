"""One backend of the serving bench, in a process of its own: an engine, the rows, the figures as JSON lines.

Every row is timed on prompts that the prefix cache holds, so that decoding alone is measured: the time of
``new_tokens`` more tokens, after the same number of warm-up tokens.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

from pydantic import BaseModel

BACKENDS: dict[str, dict[str, Any]] = {
    "oscar": {"attention_backend": "OSCAR"},
    "bf16": {"attention_backend": "FLASH_ATTN"},
    "fp8": {"attention_backend": "FLASH_ATTN", "kv_cache_dtype": "fp8"},
    "turboquant": {"kv_cache_dtype": "turboquant_3bit_nc"},
    "stock": {},
}
"""Engine arguments of what is compared; "stock" is whatever vLLM picks."""


class ServeSpec(BaseModel):
    """What one worker does."""

    backend: str
    model: str
    """Path or id."""
    dummy: bool
    """Random weights, no tokenizer."""
    recipe: str | None
    rows: list[tuple[int, int]]
    """(requests, prompt tokens), in the order to run."""
    prefill: list[int]
    """Prompt lengths whose prefill and prefix hit are timed, one request each."""
    job: tuple[int, int, int] | None
    """(requests, context tokens, new tokens) of the throughput job."""
    new_tokens: int
    chunk: int
    """max_num_batched_tokens."""
    engine: dict[str, Any]
    """More engine arguments."""


class Bench:
    """An engine and how it is timed."""

    def __init__(self, spec: ServeSpec) -> None:
        import torch
        from vllm import LLM, SamplingParams

        self.spec, self.params = spec, SamplingParams
        arguments: dict[str, Any] = dict(BACKENDS[spec.backend])
        if spec.backend == "oscar" and spec.recipe:
            arguments["additional_config"] = {"oscar": {"recipe": spec.recipe}}
        if spec.dummy:
            arguments |= {"load_format": "dummy", "skip_tokenizer_init": True}
        arguments |= {"max_num_batched_tokens": spec.chunk, "enable_prefix_caching": True, "disable_log_stats": True}
        start = time.perf_counter()
        self.llm = LLM(model=spec.model, **(arguments | spec.engine))
        self.start_seconds = time.perf_counter() - start
        self.generator = torch.Generator().manual_seed(0)
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()

    def prompts(self, requests: int, tokens: int) -> list[dict[str, list[int]]]:
        """Distinct prompts of random token ids."""
        import torch

        ids = torch.randint(10, self.vocabulary - 10, (requests, tokens), generator=self.generator)
        return [{"prompt_token_ids": row} for row in ids.tolist()]

    def seconds(self, prompts: list[dict[str, list[int]]], new_tokens: int) -> float:
        """Wall time of generating ``new_tokens`` for every prompt."""
        params = self.params(max_tokens=new_tokens, temperature=0.0, ignore_eos=True, detokenize=False)
        start = time.perf_counter()
        outputs: Any = self.llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        lengths = {len(output.outputs[0].token_ids) for output in outputs}
        if lengths != {new_tokens}:
            raise RuntimeError(f"asked for {new_tokens} tokens a request and got {sorted(lengths)}")
        return elapsed

    def capacity(self) -> dict[str, Any]:
        """KV tokens of the cache, as vLLM counts them for requests of the model's full length."""
        config = self.llm.llm_engine.vllm_config
        length = config.model_config.max_model_len
        blocks = config.cache_config.num_gpu_blocks
        tokens = blocks * config.cache_config.block_size
        if self.spec.backend == "oscar":
            from oscar_vllm.cache.capacity import tokens_that_fit
            from oscar_vllm.config import OscarConfig

            oscar = OscarConfig.from_additional_config(config.additional_config)
            tokens = tokens_that_fit(blocks, length, oscar.sink, oscar.recent)
        return {"kind": "capacity", "kv_tokens": tokens, "blocks": blocks, "start_s": self.start_seconds}

    def prefill(self, tokens: int) -> dict[str, Any]:
        """Prefill of one long prompt, then time to first token when the prefix cache holds all of it."""
        self.seconds(self.prompts(1, tokens), 1)  # compiles what this length needs
        prompt = self.prompts(1, tokens)
        cold = self.seconds(prompt, 1)
        hits = [self.seconds(prompt, 1) for _ in range(5)]
        return {"kind": "prefill", "tokens": tokens, "prefill_s": cold, "hit_ttft_ms": 1e3 * statistics.median(hits)}

    def decode(self, requests: int, tokens: int) -> dict[str, Any]:
        """Milliseconds a decode step of ``requests`` cached prompts of ``tokens`` tokens."""
        prompts = self.prompts(requests, tokens)
        self.seconds(prompts, 1)
        new, times = self.spec.new_tokens, []
        for _ in range(3):
            short = self.seconds(prompts, 4)
            times.append((self.seconds(prompts, 4 + new) - short) / new)
        step = statistics.median(times)
        return {
            "kind": "decode",
            "requests": requests,
            "tokens": tokens,
            "ms_per_token": 1e3 * step,
            "tokens_per_s": requests / step,
            "spread_ms": 1e3 * (max(times) - min(times)),
        }

    def job(self, requests: int, tokens: int, new_tokens: int) -> dict[str, Any]:
        """Tokens a second of a job whose contexts were all sent before; what the cache kept of them is not computed."""
        prompts = self.prompts(requests, tokens)
        fill = self.seconds(prompts, 1)
        elapsed = self.seconds(prompts, new_tokens)
        return {
            "kind": "job",
            "requests": requests,
            "tokens": tokens,
            "new_tokens": new_tokens,
            "fill_s": fill,
            "job_s": elapsed,
            "tokens_per_s": requests * new_tokens / elapsed,
        }


def main() -> None:
    """Read a spec, append one JSON line a figure to the output file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    spec = ServeSpec.model_validate_json(arguments.spec.read_text())

    with arguments.out.open("a") as out:

        def tell(figures: dict[str, Any]) -> None:
            line = json.dumps({"backend": spec.backend, **figures})
            print(line, file=sys.stderr, flush=True)
            out.write(line + "\n")
            out.flush()

        bench = Bench(spec)
        tell(bench.capacity())
        for tokens in spec.prefill:
            tell(bench.prefill(tokens))
        for requests, tokens in spec.rows:
            tell(bench.decode(requests, tokens))
        if spec.job:
            tell(bench.job(*spec.job))


if __name__ == "__main__":
    main()
