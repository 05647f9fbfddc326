"""Text to calibrate on, and other text to be tested on, made on the spot from what every CPython ships.

English reference prose alternates with source code, in pieces of about a thousand tokens, so that the first few
thousand tokens already hold both. The result depends on the Python version only; ``text_hash`` names it.
"""

import ast
import hashlib
import importlib.abc
import importlib.util
import inspect
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

_PIECE = 4000
"""Characters, about a thousand tokens."""
_PIECES = 60
"""Of prose and of code each, so about 120,000 tokens."""

_CALIBRATION_CODE = (
    "textwrap csv shutil tarfile configparser calendar subprocess json.decoder json.encoder threading mailbox gettext "
    "http.client urllib.request ftplib plistlib locale zipfile inspect dis base64 fileinput copy pprint shlex"
)
_HELD_OUT_PROSE = (
    "_pydecimal argparse doctest difflib pickletools statistics turtle optparse typing cmd string fractions random "
    "heapq bisect collections functools contextlib timeit trace enum pickle sched secrets profile pdb "
    "unittest.mock unittest.case logging.config concurrent.futures.thread tempfile"
)
_HELD_OUT_CODE = (
    "asyncio.base_events logging.handlers email.message smtplib http.cookiejar ipaddress uuid socketserver tokenize "
    "imaplib html.parser xml.dom.minidom xmlrpc.client selectors asyncio.streams email.header wave queue hmac "
    "urllib.parse urllib.robotparser multiprocessing.pool multiprocessing.managers poplib cProfile filecmp"
)


class TextError(ValueError):
    """A calibration text that cannot be used; the message is one sentence."""


def default_text() -> str:
    """The calibration text: the Python language reference alternating with standard-library modules.

    Raises:
        TextError: this Python comes without its sources or reference.
    """
    try:
        from pydoc_data.topics import topics
    except ImportError:
        raise TextError("This Python comes without its documentation; give a text file of your own.") from None
    prose = (topics[name] for name in sorted(topics))
    return _interleave(prose, _sources(_CALIBRATION_CODE))


def held_out_text() -> str:
    """Text for evaluation: documentation of standard-library modules alternating with the code of others.

    No module of it, and none of the language reference, is part of ``default_text``.

    Raises:
        TextError: this Python comes without its sources.
    """
    prose = (_documentation(source) for source in _sources(_HELD_OUT_PROSE))
    return _interleave(prose, _sources(_HELD_OUT_CODE))


def read_text(path: Path) -> str:
    """A text file given by the user.

    Raises:
        TextError: it cannot be read, is not UTF-8, or is empty.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise TextError(f"{path} is not UTF-8 text (byte {error.start}); convert it or give another file.") from None
    except OSError as error:
        raise TextError(f"The text {path} cannot be read ({error.strerror}); check the path.") from None
    if not text.strip():
        raise TextError(f"The text {path} is empty; give another file.")
    return text


def text_hash(text: str) -> str:
    """16 hexadecimal digits."""
    return hashlib.sha256(text.encode("utf-8", errors="surrogatepass")).hexdigest()[:16]


def _sources(modules: str) -> Iterator[str]:
    """The source of each module that this Python has; none is imported (of a submodule, its package is)."""
    for name in modules.split():
        try:
            spec = importlib.util.find_spec(name)
        except ModuleNotFoundError:  # the package of a submodule
            continue
        loader = spec.loader if spec else None
        source = loader.get_source(name) if isinstance(loader, importlib.abc.InspectLoader) else None
        if source:
            yield source


def _documentation(source: str) -> str:
    """The docstrings of a module, its classes and functions, in order, without the short ones."""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    nodes = [node for node in ast.walk(ast.parse(source)) if isinstance(node, kinds)]
    nodes.sort(key=lambda node: getattr(node, "lineno", 0))
    strings = (inspect.cleandoc(ast.get_docstring(node) or "") for node in nodes)
    return "\n\n".join(string for string in strings if len(string) > 200)


def _pieces(documents: Iterable[str]) -> list[str]:
    """The first ``_PIECES`` pieces of the documents, of about ``_PIECE`` characters, cut at paragraphs."""
    pieces: list[str] = []
    current = ""
    for document in documents:
        for paragraph in document.strip().split("\n\n"):
            current += paragraph + "\n\n"
            if len(current) >= _PIECE:
                pieces.append(current)
                current = ""
            if len(pieces) == _PIECES:
                return pieces
    return [*pieces, current] if current else pieces


def _interleave(prose: Iterable[str], code: Iterable[str]) -> str:
    pairs = zip_longest(_pieces(prose), _pieces(code), fillvalue="")
    text = "".join(part for pair in pairs for part in pair)
    if len(text) < 40 * _PIECE:
        raise TextError("This Python comes without its documentation and sources; give a text file of your own.")
    return text
