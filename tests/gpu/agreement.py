"""Greedy answers with their log-probabilities, and whether two engines answer alike for the same reasons."""

from typing import Any

import torch

Answer = tuple[list[int], list[dict[int, float]]]


def random_prompts(lengths: tuple[int, ...]) -> list[list[int]]:
    """Fixed prompts of random tokens, no two of which begin alike."""
    generator = torch.Generator().manual_seed(1)
    return [torch.randint(2, 128, (length,), generator=generator).tolist() for length in lengths]


def answers(llm: Any, prompts: list[list[int]], tokens: int) -> tuple[list[Answer], list[int]]:
    """What an engine says to prompts that it is given at once, and how many tokens of each its prefix cache had."""
    from vllm import SamplingParams

    params = SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True, logprobs=5, detokenize=False)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    said = [
        (list(o.token_ids), [{token: p.logprob for token, p in step.items()} for step in o.logprobs])
        for (o,) in (output.outputs for output in outputs)
    ]
    return said, [output.num_cached_tokens for output in outputs]


def agreed(reference: list[Answer], others: list[Answer], rounding: float) -> int:
    """Positions at which answers say the same for the same reasons; they end where the reference was undecided.

    Args:
        reference: answers to the prompts.
        others: of another engine, to the same.
        rounding: how far the log-probability of a token may be from the reference's.

    Raises:
        AssertionError: an answer parts from the reference for more than rounding.
    """
    positions = 0
    for (tokens, steps), (other_tokens, other_steps) in zip(reference, others, strict=True):
        assert len(tokens) == len(other_tokens)
        for at, (token, other) in enumerate(zip(tokens, other_tokens, strict=True)):
            step, other_step = steps[at], other_steps[at]
            assert abs(step[token] - other_step.get(token, -torch.inf)) <= rounding, (at, step, other_step)
            if token != other:
                assert step[token] - step.get(other, -torch.inf) <= rounding, (at, step, other_step)
                break
            positions += 1
    return positions
