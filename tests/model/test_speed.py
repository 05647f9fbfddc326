"""Decode speed on the CPU beside the stock backend's."""

import time
from typing import Any

from vllm import SamplingParams

from .conftest import Start

CONTEXT, NEW_TOKENS, RUNS = 1_500, 48, 3


def tokens_per_second(llm: Any, prompt: list[int]) -> float:
    """Best of some runs; the prefill is a prefix hit and its time is taken off."""

    def seconds(tokens: int) -> float:
        start = time.perf_counter()
        sampling = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True)
        llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        return time.perf_counter() - start

    seconds(4)
    return max((NEW_TOKENS - 1) / (seconds(NEW_TOKENS) - seconds(1)) for _ in range(RUNS))


def test_decode_is_at_least_a_quarter_of_the_stock_backends_speed(
    stock: Start, oscar: Start, held_out: list[int]
) -> None:
    """At 1,500 tokens of context, one process after the other on the same cores."""
    prompt = held_out[:CONTEXT]
    with stock() as llm:
        expected = tokens_per_second(llm, prompt)
    with oscar() as llm:
        given = tokens_per_second(llm, prompt)
    print(f"{given:.1f} tokens per second, stock {expected:.1f}, ratio {given / expected:.2f}")
    assert given >= expected / 4
