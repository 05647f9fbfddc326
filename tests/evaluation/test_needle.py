import pytest

from oscar_vllm.evaluation.needle import make_needles, score

from .tokenizer import WordTokenizer

FILLER = "\n".join(f"line {i} of a long and dull text" for i in range(2000))
DEPTHS = (0.0, 0.25, 0.5, 1.0)


def test_needles_stand_where_they_should() -> None:
    tokenizer = WordTokenizer()
    needles = make_needles(tokenizer, FILLER, (500, 2000), DEPTHS, repeats=2)
    assert len(needles) == 2 * len(DEPTHS) * 2
    for needle in needles:
        assert needle.length - 20 <= len(needle.prompt) <= needle.length
        text = tokenizer.decode(needle.prompt)
        assert text.count(needle.answer) == 1
        place = text.index(needle.answer) / text.index("\n\nWhat is the secret")
        assert abs(place - needle.depth) < 0.12
        sentence = next(line for line in text.splitlines() if needle.answer in line)
        assert sentence.removeprefix("user: ").startswith("The secret number of")
    assert len({needle.answer for needle in needles}) == len(needles)


def test_prompts_are_the_same_every_time() -> None:
    first, second = (make_needles(WordTokenizer(), FILLER, (500,), DEPTHS) for _ in range(2))
    assert first == second


def test_hits_by_length_and_depth() -> None:
    needles = make_needles(WordTokenizer(), FILLER, (500, 900), (0.2, 0.8), repeats=2)
    answers = [f"The number is {needle.answer}." for needle in needles]
    answers[0], answers[3] = "1234567", f"{int(answers[3][14:21]):,}"
    cells = score(needles, answers)
    assert [(c["length"], c["depth"], c["hits"], c["prompts"]) for c in cells] == [
        (500, 0.2, 1, 2),
        (500, 0.8, 2, 2),
        (900, 0.2, 2, 2),
        (900, 0.8, 2, 2),
    ]


@pytest.mark.parametrize("length", [10, 100_000], ids=["shorter than the question", "longer than the filler"])
def test_impossible_lengths_are_refused(length: int) -> None:
    with pytest.raises(ValueError, match=f"A needle prompt of {length} tokens needs"):
        make_needles(WordTokenizer(), FILLER, (length,), (0.5,))
