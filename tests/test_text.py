"""Calibration and evaluation text: long enough, made the same way every time, and without overlap."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from oscar_vllm.calibration.text import TextError, default_text, held_out_text, read_text, text_hash


@pytest.mark.parametrize("make", [default_text, held_out_text])
def test_text_is_long_and_varied(make: Callable[[], str]) -> None:
    text = make()
    assert 200_000 < len(text) < 1_000_000  # at least 32K tokens at 6 characters a token
    start = text[:20_000]  # a few thousand tokens already hold prose and code
    assert start.count("def ") >= 3
    assert start.count(". ") + start.count(".\n") > 50


def test_texts_do_not_overlap() -> None:
    lines, held_out = ({line.strip() for line in text.splitlines()} for text in (default_text(), held_out_text()))
    assert not {line for line in lines & held_out if len(line) > 60}


def test_text_is_the_same_in_another_process() -> None:
    code = "from oscar_vllm.calibration.text import *; print(text_hash(default_text()), text_hash(held_out_text()))"
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.split() == [text_hash(default_text()), text_hash(held_out_text())]


def test_text_hash() -> None:
    assert text_hash("abc") == "ba7816bf8f01cfea"
    assert len({text_hash(text) for text in ("", "a", "b", "\ud800")}) == 4


def test_text_of_the_user(tmp_path: Path) -> None:
    path = tmp_path / "t.txt"
    path.write_text("Grüße, 世界\n", encoding="utf-8")
    assert read_text(path) == "Grüße, 世界\n"
    for content, sentence in (
        (b"ok \xff", f"{path} is not UTF-8 text (byte 3); convert it or give another file."),
        (b" \n", f"The text {path} is empty; give another file."),
    ):
        path.write_bytes(content)
        with pytest.raises(TextError) as caught:
            read_text(path)
        assert str(caught.value) == sentence
    with pytest.raises(TextError) as caught:
        read_text(tmp_path / "none")
    assert (
        str(caught.value) == f"The text {tmp_path / 'none'} cannot be read (No such file or directory); check the path."
    )
