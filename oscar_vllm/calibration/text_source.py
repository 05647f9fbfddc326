"""Where a calibration text comes from: the one that ships, a file, a folder, a data set of the Hugging Face hub."""

import re
from collections.abc import Iterable, Iterator
from itertools import islice
from pathlib import Path

from oscar_vllm.calibration.text import TextError, default_text, read_text

LIMIT = 4_000_000
"""Characters taken of a folder or a data set, about a million tokens: no more is ever calibrated on."""
SUFFIXES = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".ts", ".java", ".go", ".rs", ".html", ".tex")
_DATASET = re.compile(r"hf:(?P<name>[\w./-]+?)(@(?P<revision>[\w./-]+))?(:(?P<split>[\w-]+))?")
_COLUMNS = ("text", "content", "document", "article")


def read_source(source: str | None) -> str:
    """The text of a source. The same source gives the same text, so that a calibration can be made again.

    Args:
        source: None: the text that ships; ``hf:name[@revision][:split]``; else a file or a folder of text files, which
            are taken in the order of their paths.

    Raises:
        TextError: it cannot be read, is not UTF-8, or has no text.
    """
    if source is None:
        return default_text()
    match = _DATASET.fullmatch(source)
    if match is not None:
        return _dataset(match["name"], match["revision"], match["split"] or "train")
    path = Path(source).expanduser()
    return _folder(path) if path.is_dir() else read_text(path)


def _folder(folder: Path) -> str:
    files = sorted(path for path in folder.rglob("*") if path.suffix.lower() in SUFFIXES and path.is_file())
    if not files:
        raise TextError(f"The folder {folder} has no text files ({', '.join(SUFFIXES)}); give another one.")
    # One that is empty is no reason to give up: a source tree is full of empty __init__.py.
    return _joined(read_text(path) for path in files if path.stat().st_size)


def _dataset(name: str, revision: str | None, split: str) -> str:
    try:
        from datasets import load_dataset
    except ImportError:
        raise TextError("Reading a data set needs the package datasets; install it or give a text file.") from None
    try:
        rows = load_dataset(name, revision=revision, split=split, streaming=True)
        return _joined(_texts(rows, name))
    except TextError:
        raise
    except Exception as error:  # the hub client raises many kinds; the sentence names the cause
        raise TextError(
            f"The data set {name} cannot be read ({type(error).__name__}); check its name and the network, or give a "
            "text file."
        ) from None


def _texts(rows: Iterable[dict[str, object]], name: str) -> Iterator[str]:
    """The first column of every row that holds text."""
    for row in islice(rows, 100_000):
        column = next((column for column in (*_COLUMNS, *row) if isinstance(row.get(column), str)), None)
        if column is None:
            raise TextError(f"The data set {name} has no column of text; give another one.")
        yield str(row[column])


def _joined(texts: Iterable[str]) -> str:
    """Texts one after the other, as many as fit."""
    parts: list[str] = []
    left = LIMIT
    for text in texts:
        parts.append(text[:left])
        left -= len(parts[-1])
        if left <= 0:
            break
    joined = "\n\n".join(parts)
    if not joined.strip():
        raise TextError("The calibration text is empty; give another one.")
    return joined
