"""What to evaluate, and the texts and prompts for it: everything that can be refused before a model is loaded."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from oscar_vllm.calibration.text import held_out_text
from oscar_vllm.evaluation.generation import NEEDLE_TOKENS
from oscar_vllm.evaluation.humaneval import NEW_TOKENS, Problem, load_problems
from oscar_vllm.evaluation.methods import EvaluationError, Method
from oscar_vllm.evaluation.needle import Needle, make_needles

SKIP = 320
"""Positions at a text's beginning that are left out: all they attend to lies in the unquantized windows."""
LENGTHS = (1024, 2048, 4096, 7680, 16384, 30000)
LONGEST_ON_CPU = 8192
DEPTHS = (0.1, 0.3, 0.5, 0.7, 0.9)


@dataclass
class Plan:
    """What to evaluate."""

    model: str
    methods: list[Method]
    tokens: int = 8000
    """Positions to compare, at least; 0: no teacher-forced comparison."""
    length: int = 2400
    """Tokens of one text."""
    needle: bool = False
    needle_lengths: tuple[int, ...] | None = None
    """Prompt tokens; None: the usual ones, as far as the model's context and this machine's speed go."""
    needle_repeats: int = 1
    problems: int = 0
    """HumanEval problems to solve, of 164."""
    tasks: list[Method] = field(default_factory=list)
    """Methods that answer needles and HumanEval."""
    recipe: Path | None = None
    """Of ``ours``; None: the cached one."""
    engine_options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Inputs:
    """Token ids that every method gets."""

    texts: list[list[int]]
    """Of one length; none where distributions are not compared."""
    needles: list[Needle]
    problems: list[Problem]

    @property
    def longest(self) -> int:
        """Tokens of the longest task, its answer included; 0 without tasks."""
        lengths = [len(needle.prompt) + NEEDLE_TOKENS for needle in self.needles]
        return max([*lengths, *(len(problem.prompt) + NEW_TOKENS for problem in self.problems)], default=0)


def prepare_inputs(plan: Plan, tokenizer: Any, context: int) -> Inputs:
    """The plan's texts and prompts.

    Args:
        context: tokens that the model was made for.

    Raises:
        EvaluationError: the model's context or the shipped text cannot give what is asked, or a task is asked of a
            method that does not answer.
    """
    for method in plan.tasks:
        if method.path != "served":
            raise EvaluationError(f'"{method.name}" exists in reference maths only and answers nothing; leave it out.')
    inputs = Inputs(
        _texts(plan, tokenizer, context) if plan.tokens else [],
        make_needles(tokenizer, held_out_text(), _needle_lengths(plan, context), DEPTHS, repeats=plan.needle_repeats),
        load_problems(tokenizer)[: plan.problems] if plan.problems else [],
    )
    if inputs.longest > context:
        raise EvaluationError(
            f"The prompts and answers need {inputs.longest} tokens and the model's context is {context}; ask for "
            "shorter --needle-lengths or leave out --humaneval."
        )
    return inputs


def _texts(plan: Plan, tokenizer: Any, context: int) -> list[list[int]]:
    length = min(plan.length, context - 1)
    count = -(-plan.tokens // max(length - 1 - SKIP, 1))
    ids = tokenizer.encode(held_out_text())
    if length <= SKIP + 1 or count * length > len(ids):
        raise EvaluationError(
            f"{plan.tokens} positions in texts of {length} tokens need {count * length} tokens and the shipped text "
            f"has {len(ids)}; ask for fewer --tokens or another --length."
        )
    return [ids[i * length : (i + 1) * length] for i in range(count)]


def _needle_lengths(plan: Plan, context: int) -> tuple[int, ...]:
    from vllm.platforms import current_platform

    if not plan.needle or plan.needle_lengths is not None:
        return plan.needle_lengths or ()
    longest = min(context, LONGEST_ON_CPU) if current_platform.is_cpu() else context
    return tuple(length for length in LENGTHS if length + NEEDLE_TOKENS <= longest)
