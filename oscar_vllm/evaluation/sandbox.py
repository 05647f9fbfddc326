"""Generated programs, run each in a process of its own with limits on time, memory, files and the network.

This keeps careless code from doing harm; it is no defence against a determined attacker, for whom the whole
evaluation belongs into a container or a virtual machine.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from oscar_vllm.evaluation.methods import EvaluationError

_GUARD = Path(__file__).with_name("sandbox_guard.py")
_PASSED = 42
"""``sandbox_guard.PASSED``: the status of a program that ran to its end."""
_NOBODY = 65534
_PROBE = "import collections, datetime, functools, hashlib, heapq, itertools, math, random, re, string, typing"
"""What solutions import; the user nobody may not be able to read this Python's library."""
_OUT_OF_TIME = (-signal.SIGXCPU, -signal.SIGKILL, 128 + signal.SIGXCPU, 128 + signal.SIGKILL)
"""Statuses after the limit on CPU time, seen directly and through ``unshare``."""


@dataclass(frozen=True)
class Outcome:
    """How one program ended."""

    passed: bool
    reason: str
    """"passed", "timed out", or the last line it wrote to stderr."""


@dataclass(frozen=True)
class Sandbox:
    """What holds a program; ``strongest`` finds out what this machine allows."""

    network_namespace: bool = False
    """No network but an unconnected loopback (``unshare --net``); without it only Python's sockets are refused."""
    nobody: bool = False
    """Run as the user nobody, where this process is root's."""
    seconds: int = 10
    """Wall-clock time, and CPU time."""
    megabytes: int = 1024
    """Address space."""

    @classmethod
    def strongest(cls, seconds: int = 10, megabytes: int = 1024) -> "Sandbox":
        """The strictest isolation in which a program can import the usual modules here.

        Raises:
            EvaluationError: none does.
        """
        roots = (True, False) if hasattr(os, "geteuid") and os.geteuid() == 0 else (False,)
        reason = ""
        for namespace in (True, False) if shutil.which("unshare") else (False,):
            for nobody in roots:
                sandbox = cls(namespace, nobody, seconds, megabytes)
                outcome = sandbox.run(_PROBE)
                if outcome.passed:
                    return sandbox
                reason = outcome.reason
        raise EvaluationError(f"No sandbox runs a Python program here ({reason}); leave out --humaneval.")

    def run(self, source: str) -> Outcome:
        """Run a program; it passes if it ends by itself without an error."""
        with tempfile.TemporaryDirectory(prefix="oscar-sandbox-") as folder:
            work = Path(folder) / "work"
            work.mkdir()
            program = Path(folder) / "program.py"
            program.write_text(source, encoding="utf-8", errors="replace")
            if self.nobody:
                os.chmod(folder, 0o755)
                os.chown(work, _NOBODY, _NOBODY)
            return self._execute(program, work)

    def run_all(self, sources: Sequence[str]) -> list[Outcome]:
        """Run many programs, as many at a time as there are processors."""
        with ThreadPoolExecutor(os.cpu_count() or 1) as pool:
            return list(pool.map(self.run, sources))

    def _execute(self, program: Path, work: Path) -> Outcome:
        command = [sys.executable, "-B", str(_GUARD), str(program), str(self.megabytes), str(self.seconds)]
        identity: dict[str, Any] = {}
        if self.nobody and self.network_namespace:  # only root may leave the network, so the identity goes last
            command = ["setpriv", f"--reuid={_NOBODY}", f"--regid={_NOBODY}", "--clear-groups", "--", *command]
        elif self.nobody:
            identity = {"user": _NOBODY, "group": _NOBODY, "extra_groups": []}
        if self.network_namespace:
            # A user who is not root may do so in a user namespace of their own.
            own = [] if os.geteuid() == 0 else ["--map-current-user"]
            command = ["unshare", "--net", *own, "--", *command]
        errors = work.parent / "stderr"
        with errors.open("wb") as stream:  # a file, so that the limit on files bounds it
            process = subprocess.Popen(
                command,
                cwd=work,
                env={"PATH": os.defpath, "PYTHONPATH": os.pathsep.join(filter(None, sys.path)), "LANG": "C.UTF-8"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=stream,
                start_new_session=True,  # so that the whole group can be ended
                **identity,
            )
        try:
            status = process.wait(timeout=self.seconds)
        except subprocess.TimeoutExpired:
            return Outcome(False, "timed out")
        finally:
            _end_group(process)
        if status == _PASSED:
            return Outcome(True, "passed")
        if status in _OUT_OF_TIME:
            return Outcome(False, "timed out")
        lines = errors.read_bytes().decode("utf-8", "replace").strip().splitlines()
        return Outcome(False, lines[-1][:200] if lines else f"exit status {status}")


def _end_group(process: "subprocess.Popen[bytes]") -> None:
    """Nothing that the program started outlives it."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()
