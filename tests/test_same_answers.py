"""The example that counts answers which differ: what it counts, and that every pair names runs that there are."""

from typing import Any

import pytest
from scripts import load_script


@pytest.fixture(scope="module")
def example() -> Any:
    return load_script("examples/same_answers.py")


def test_answers_part_once_and_count_up_to_there(example: Any) -> None:
    one = [[1, 2, 3, 4], [5, 6, 7, 8], [9, 9, 9, 9]]
    other = [[1, 2, 3, 4], [5, 0, 0, 8], [9, 9, 9, 0]]
    share, rate = example.parted(one, other)
    assert share == pytest.approx(100 * 2 / 3)
    assert rate == pytest.approx(100 * 2 / (4 + 2 + 4))
    assert example.parted(one, one) == (0, 0)


def test_every_pair_names_runs_that_there_are(example: Any) -> None:
    for pair in example.PAIRS.values():
        for engine, run in pair:
            assert engine in example.ENGINES
            assert run in ("together", "again") or (run == "alone" and engine in ("plain", "ngram"))
