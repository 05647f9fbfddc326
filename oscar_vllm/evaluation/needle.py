"""Needle in a haystack: one sentence with a number somewhere in a long text, and a question for the number."""

import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from oscar_vllm.evaluation.chat import question_ids
from oscar_vllm.evaluation.methods import EvaluationError

_CITIES = ("Lisbon", "Oslo", "Nairobi", "Lima", "Hanoi", "Quito", "Dakar", "Riga", "Perth", "Bergen", "Kyoto", "Malaga")


@dataclass(frozen=True)
class Needle:
    """One prompt and its answer."""

    length: int
    """Prompt tokens aimed at."""
    depth: float
    """Where the sentence stands: 0 the beginning, 1 the end."""
    answer: str
    prompt: list[int]


def make_needles(
    tokenizer: Any, filler: str, lengths: Iterable[int], depths: Sequence[float], *, repeats: int = 1, seed: int = 0
) -> list[Needle]:
    """Prompts for every length and depth, ``repeats`` each with other numbers and other stretches of the filler.

    Args:
        filler: text around the needle, at least as long as the longest prompt.

    Raises:
        EvaluationError: the filler is too short.
    """
    ids = list(tokenizer.encode(filler, add_special_tokens=False))
    overhead = len(question_ids(tokenizer, _content("", "", "Lisbon", "0000000")))
    draw = random.Random(seed)
    needles = []
    for length in lengths:
        wanted = length - overhead - 8  # tokens merge differently where texts meet
        if not 0 < wanted <= len(ids):
            raise EvaluationError(
                f"A needle prompt of {length} tokens needs {wanted} of filler and there are {len(ids)}; choose another."
            )
        for depth in depths:
            for _ in range(repeats):
                city, number = draw.choice(_CITIES), str(draw.randrange(1_000_000, 10_000_000))
                start = draw.randrange(len(ids) - wanted + 1)
                before, after = _split(tokenizer.decode(ids[start : start + wanted]), depth)
                prompt = question_ids(tokenizer, _content(before, after, city, number))
                needles.append(Needle(length, depth, number, prompt[:]))
    return needles


def _content(before: str, after: str, city: str, number: str) -> str:
    return (
        f"{before}\nThe secret number of {city} is {number}.\n{after}\n\n"
        f"What is the secret number of {city} that the text above gives? Answer with the number only."
    )


def _split(text: str, depth: float) -> tuple[str, str]:
    """At the line break nearest to the depth, so that the needle does not cut a word."""
    middle = round(depth * len(text))
    if depth in (0, 1):
        return text[:middle], text[middle:]
    cut = max(text.rfind("\n", 0, middle) + 1, 0)
    return text[:cut], text[cut:]


def score(needles: Sequence[Needle], answers: Sequence[str]) -> list[dict[str, Any]]:
    """A row for every length and depth: prompts, hits, and the tokens of the longest prompt."""
    cells: dict[tuple[int, float], dict[str, Any]] = {}
    for needle, answer in zip(needles, answers, strict=True):
        fresh = {"length": needle.length, "depth": needle.depth, "prompts": 0, "hits": 0, "tokens": 0}
        cell = cells.setdefault((needle.length, needle.depth), fresh)
        cell["prompts"] += 1
        cell["hits"] += needle.answer in answer.replace(",", "").replace(" ", "")
        cell["tokens"] = max(cell["tokens"], len(needle.prompt))
    return list(cells.values())
