"""One backend of the serving bench, in a process of its own: an engine, the rows, the figures as JSON lines.

Every row is timed on prompts that the prefix cache holds. With random weights they get there without being computed
(:mod:`oscar_vllm.bench.fill`); a real model computes them.
"""

import argparse
import json
import statistics
import sys
import time
from math import ceil
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
REPEATS = 3

Prompts = list[dict[str, list[int]]]


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
        arguments |= {
            "max_num_batched_tokens": spec.chunk,
            "enable_prefix_caching": True,
            "disable_log_stats": False,  # the times of first and last tokens
            "worker_extension_cls": "oscar_vllm.bench.fill.CacheFill",
        }
        start = time.perf_counter()
        self.llm = LLM(model=spec.model, **(arguments | spec.engine))
        self.start_seconds = time.perf_counter() - start
        self.generator = torch.Generator().manual_seed(0)
        self.vocabulary = self.llm.llm_engine.model_config.get_vocab_size()
        self.config = self.llm.llm_engine.vllm_config
        if spec.dummy:
            self.llm.collective_rpc("oscar_bench_randomize_caches")

    def prompts(self, requests: int, tokens: int) -> Prompts:
        """Distinct prompts of random token ids."""
        import torch

        ids = torch.randint(10, self.vocabulary - 10, (requests, tokens), generator=self.generator)
        return [{"prompt_token_ids": row} for row in ids.tolist()]

    def generate(self, prompts: Prompts, new_tokens: list[int]) -> tuple[list[Any], float]:
        """Outputs and wall time of generating that many tokens for each prompt."""
        params = [self.params(max_tokens=n, temperature=0.0, ignore_eos=True, detokenize=False) for n in new_tokens]
        start = time.perf_counter()
        outputs: list[Any] = self.llm.generate(prompts, params, use_tqdm=False)
        elapsed = time.perf_counter() - start
        lengths = [len(output.outputs[0].token_ids) for output in outputs]
        if lengths != new_tokens:
            raise RuntimeError(f"asked for {new_tokens} tokens a request and got {lengths}")
        return outputs, elapsed

    def seconds(self, prompts: Prompts, new_tokens: int) -> float:
        """Wall time of generating ``new_tokens`` for every prompt."""
        return self.generate(prompts, [new_tokens] * len(prompts))[1]

    def fill(self, prompts: Prompts) -> float:
        """Wall time of putting prompts into the prefix cache."""
        if self.spec.dummy:
            self.llm.collective_rpc("oscar_bench_skip_model", args=(True,))
        elapsed = self.seconds(prompts, 1)
        if self.spec.dummy:
            self.llm.collective_rpc("oscar_bench_skip_model", args=(False,))
        return elapsed

    def requests_that_fit(self, tokens: int) -> int:
        """Requests of ``tokens`` tokens that the cache holds at once."""
        cache = self.config.cache_config
        if self.spec.backend != "oscar":
            return int((cache.num_gpu_blocks - 1) // ceil(tokens / cache.block_size))
        from oscar_vllm.cache.capacity import request_blocks
        from oscar_vllm.config import OscarConfig

        oscar = OscarConfig.from_additional_config(self.config.additional_config)
        return int((cache.num_gpu_blocks - 1) // request_blocks(tokens, oscar.sink, oscar.recent))

    def capacity(self) -> dict[str, Any]:
        """KV tokens that the cache holds of decoding requests of the model's full length."""
        length = self.config.model_config.max_model_len
        blocks = self.config.cache_config.num_gpu_blocks
        tokens = blocks * self.config.cache_config.block_size
        if self.spec.backend == "oscar":
            from oscar_vllm.cache.capacity import tokens_that_fit
            from oscar_vllm.config import OscarConfig

            oscar = OscarConfig.from_additional_config(self.config.additional_config)
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
        """Milliseconds a decode step of ``requests`` cached prompts of ``tokens`` tokens.

        From the engine's own times of first and last tokens. Several requests wait behind the prefill of a full chunk,
        so that all of them are there when the first of them is decoded.
        """
        prompts = self.prompts(requests, tokens)
        self.fill(prompts)
        new = 1 + self.spec.new_tokens
        times = []
        for _ in range(REPEATS):
            ahead = self.prompts(1, min(self.spec.chunk, self.config.model_config.max_model_len - 1))
            ahead = ahead if requests > 1 else []
            outputs, _ = self.generate([*ahead, *prompts], [1] * len(ahead) + [new] * requests)
            last = max((output.metrics for output in outputs[len(ahead) :]), key=lambda m: m.first_token_ts)
            times.append((last.last_token_ts - last.first_token_ts) / (new - 1))
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
        """Tokens a second of a job of requests whose contexts were all sent before.

        Where the cache holds them all, the job is run. Where it does not, one wave of as many as fit is run on cached
        contexts and stands for all; each context that does not fit costs the time that computing one takes.
        That is the best a cache can do: one that drops its least recent contexts computes all of them again.
        ``tokens_per_s_kept`` leaves the computing out altogether.
        """
        kept = min(requests, self.requests_that_fit(tokens + new_tokens))
        wave = min(kept, self.config.scheduler_config.max_num_seqs)
        prompts = self.prompts(wave, tokens)
        again = 0.0
        if kept < requests:
            again = self.seconds(self.prompts(1, tokens), 1) * (requests - kept)
        fill = self.fill(prompts)
        decoding = self.seconds(prompts, new_tokens) * requests / wave
        return {
            "kind": "job",
            "requests": requests,
            "tokens": tokens,
            "new_tokens": new_tokens,
            "at_once": wave,
            "fill_s": fill,
            "decode_s": decoding,
            "again_s": again,
            "tokens_per_s": requests * new_tokens / (decoding + again),
            "tokens_per_s_kept": requests * new_tokens / decoding,
        }


def main() -> None:
    """Read a spec, append one JSON line a figure to the output file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spec", type=Path)
    parser.add_argument("out", type=Path)
    arguments = parser.parse_args()
    spec = ServeSpec.model_validate_json(arguments.spec.read_text())
    import vllm  # noqa: F401

    sys.stdin.readline()  # the GPU is another worker's until then

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
