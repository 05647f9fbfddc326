"""Tasks that are answered in text: needle prompts and HumanEval, through an engine that takes many requests."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from oscar_vllm.engine import cpu_options, engine
from oscar_vllm.evaluation.humaneval import NEW_TOKENS, Problem, program
from oscar_vllm.evaluation.needle import Needle, score
from oscar_vllm.evaluation.sandbox import Sandbox
from oscar_vllm.evaluation.served import WORKER

CHUNK = 512
"""Tokens of a prompt that one step prefills: all but a prompt's end reads what is far from it from the cache."""
NEEDLE_TOKENS = 24


@contextmanager
def answering(model: str, *, longest: int, **options: Any) -> Iterator[Any]:
    """An engine that answers prompts of up to ``longest`` tokens, the answer included."""
    on_cpu = cpu_options(2.0)
    settings: dict[str, Any] = {
        "worker_extension_cls": WORKER,
        "enforce_eager": True,
        "enable_prefix_caching": False,
        "max_model_len": longest,
        "max_num_batched_tokens": CHUNK if on_cpu else 16 * CHUNK,
        "max_num_seqs": 4 if on_cpu else 192,
        "long_prefill_token_threshold": min(CHUNK, longest),
        "disable_log_stats": True,
        **on_cpu,
        **options,
    }
    with engine(model, **settings) as llm:
        yield llm


def find_needles(llm: Any, needles: Sequence[Needle]) -> list[dict[str, Any]]:
    """Hits by length and depth."""
    return score(needles, _answers(llm, [needle.prompt for needle in needles], NEEDLE_TOKENS))


def solve(llm: Any, problems: Sequence[Problem], sandbox: Sandbox) -> dict[str, Any]:
    """HumanEval's pass@1 with greedy answers.

    Returns:
        ``problems``, ``passed``, ``pass_at_1``, and for each problem how its program ended (``outcomes``).
    """
    answers = _answers(llm, [problem.prompt for problem in problems], NEW_TOKENS)
    outcomes = sandbox.run_all([program(problem, answer) for problem, answer in zip(problems, answers, strict=True)])
    passed = sum(outcome.passed for outcome in outcomes)
    return {
        "problems": len(problems),
        "passed": passed,
        "pass_at_1": passed / len(problems),
        "outcomes": {p.task_id: outcome.reason for p, outcome in zip(problems, outcomes, strict=True)},
        "answers": {p.task_id: answer for p, answer in zip(problems, answers, strict=True)},
    }


def _answers(llm: Any, prompts: Sequence[list[int]], tokens: int) -> list[str]:
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0.0, max_tokens=tokens)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], sampling, use_tqdm=False)
    return [output.outputs[0].text for output in outputs]
