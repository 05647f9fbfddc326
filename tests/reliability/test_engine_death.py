"""A process of the engine is killed in the middle of a request: the server says so, ends, and starts again as new."""

import json
import os
import signal
import sys
import time
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path

import pytest

sys.path.append(str(Path(__file__).parents[2] / "ci"))

from server import Server

PROMPT = "The capital of France is"
OPTIONS = ["--max-model-len", "512", "--enforce-eager", "--additional-config", '{"oscar": {"recipe": "hadamard"}}']


def shared_memory(server: Server) -> set[str]:
    """Files of /dev/shm that processes of the server have mapped."""
    found = set()
    for process in [server.process.pid, *server.descendants()]:
        try:
            maps = Path(f"/proc/{process}/maps").read_text()
        except OSError:
            continue
        found |= {line.split(maxsplit=5)[5] for line in maps.splitlines() if "/dev/shm/" in line}
    return {path for path in found if not path.endswith("(deleted)")}


def wait_for(condition: object, seconds: float) -> bool:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if condition():  # type: ignore[operator]
            return True
        time.sleep(0.2)
    return False


def kill_in_the_middle(server: Server, name: str) -> None:
    """Kill the process called ``name`` while a stream is read: the stream must not end as if it were whole."""
    memory = shared_memory(server)
    processes = server.descendants()
    (victim,) = [process for process, other in processes.items() if name in other]
    connection, events = server.stream(PROMPT, 400, ignore_eos=True)
    received = [next(events), next(events)]
    os.kill(victim, signal.SIGKILL)
    try:
        received += list(events)
    except (OSError, HTTPException):
        pass
    finally:
        connection.close()
    finished = [json.loads(event)["choices"][0]["finish_reason"] for event in received if b'"choices"' in event]
    assert not any(finished), "a cut answer must not look like a whole one"
    assert wait_for(lambda: server.process.poll() is not None, 60), "the server must end with its engine"
    assert server.process.returncode != 0 or "EngineDeadError" in server.log.read_text()
    assert wait_for(lambda: not any(Path(f"/proc/{process}").exists() for process in processes), 30), "orphans"
    assert wait_for(lambda: not any(Path(path).exists() for path in memory), 10), "shared memory is left"


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, model: str) -> Iterator[Path]:
    """An empty OSCAR_CACHE; nothing may be left in it."""
    folder = tmp_path / "cache"
    folder.mkdir()
    monkeypatch.setenv("OSCAR_CACHE", str(folder))
    yield folder
    assert list(folder.rglob("*")) == []


def test_the_server_dies_loudly_and_starts_again_cleanly(model: str, tmp_path: Path, cache: Path) -> None:
    texts = []
    for name in ("Worker", "EngineCor"):  # Linux keeps 15 characters of "VLLM::EngineCore"
        with Server(model, tmp_path / name, OPTIONS) as server:
            texts.append(server.complete(PROMPT, 8)["text"])
            kill_in_the_middle(server, name)
            assert not server.healthy()
    assert "Paris" in texts[0]
    assert texts[0] == texts[1]
