"""Calibration text from files, folders and data sets."""

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from oscar_vllm.calibration import text_source
from oscar_vllm.calibration.text import TextError, default_text
from oscar_vllm.calibration.text_source import read_source


def refusal(source: str) -> str:
    with pytest.raises(TextError) as caught:
        read_source(source)
    return str(caught.value)


def test_nothing_given_is_the_text_that_ships() -> None:
    assert read_source(None) == default_text()


def test_file_and_folder(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    for name, content in (("b/c.md", "third"), ("a.txt", "first"), ("b/a.py", "second"), ("b/empty.py", "")):
        (tmp_path / name).write_text(content)
    (tmp_path / "weights.bin").write_bytes(b"\xff\xfe")
    assert read_source(str(tmp_path / "a.txt")) == "first"
    assert read_source(str(tmp_path)) == "first\n\nsecond\n\nthird"
    assert refusal(str(tmp_path / "none")).endswith("cannot be read (No such file or directory); check the path.")
    (tmp_path / "b" / "d.txt").write_bytes(b"\xff")
    assert refusal(str(tmp_path)).endswith("d.txt is not UTF-8 text (byte 0); convert it or give another file.")


def test_folder_without_text(tmp_path: Path) -> None:
    (tmp_path / "image.png").write_bytes(b"png")
    assert refusal(str(tmp_path)).startswith(f"The folder {tmp_path} has no text files (.txt, .md,")
    (tmp_path / "blank.txt").write_text(" \n")
    assert refusal(str(tmp_path)) == f"The text {tmp_path}/blank.txt is empty; give another file."


def test_a_large_folder_is_cut(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_source, "LIMIT", 10)
    for name in "abc":
        (tmp_path / f"{name}.txt").write_text(name * 6)
    assert read_source(str(tmp_path)) == "aaaaaa\n\nbbbb"


def data_sets(monkeypatch: pytest.MonkeyPatch, rows: Any) -> list[Any]:
    """Stands in for the package datasets; returns the calls of load_dataset."""
    calls: list[Any] = []

    def load_dataset(name: str, **options: Any) -> Any:
        calls.append((name, options))
        if isinstance(rows, Exception):
            raise rows
        return iter(rows)

    monkeypatch.setitem(sys.modules, "datasets", SimpleNamespace(load_dataset=load_dataset))
    return calls


def test_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = data_sets(monkeypatch, [{"id": 1, "text": "one"}, {"id": 2, "text": "two"}])
    assert read_source("hf:org/name") == "one\n\ntwo"
    assert read_source("hf:org/name@v2:test") == "one\n\ntwo"
    assert calls == [
        ("org/name", {"revision": None, "split": "train", "streaming": True}),
        ("org/name", {"revision": "v2", "split": "test", "streaming": True}),
    ]


@pytest.mark.parametrize(
    ("rows", "sentence"),
    [
        (
            ConnectionError(),
            "The data set org/name cannot be read (ConnectionError); check its name and the network, or give a text "
            "file.",
        ),
        ([{"id": 1}], "The data set org/name has no column of text; give another one."),
        ([], "The calibration text is empty; give another one."),
    ],
    ids=["no network", "no text", "empty"],
)
def test_data_sets_that_give_no_text(monkeypatch: pytest.MonkeyPatch, rows: Any, sentence: str) -> None:
    data_sets(monkeypatch, rows)
    assert refusal("hf:org/name") == sentence


def test_data_set_without_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    assert refusal("hf:org/name") == "Reading a data set needs the package datasets; install it or give a text file."
