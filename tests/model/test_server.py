"""``vllm serve`` on this machine, asked by the openai client."""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.request import urlopen

import pytest
from openai import OpenAI

START_SECONDS = 240


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def client(model: str, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[OpenAI]:
    """A server started as the README says: its engine in a process of its own, the model compiled."""
    port = free_port()
    log = tmp_path_factory.mktemp("server") / "log"
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--attention-backend", "OSCAR"]
    command += [
        "--model",
        model,
        "--port",
        str(port),
        "--host",
        "127.0.0.1",
        "--max-model-len",
        "2048",
        "--served-model-name",
        "demo",
    ]
    command += ["--additional-config", f'{{"oscar": {{"recipe": "{recipe}"}}}}']
    environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_LOGGING_LEVEL": "INFO"}
    environment.pop("TRITON_INTERPRET", None)
    with log.open("w") as output:
        server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        for _ in range(START_SECONDS):
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (URLError, ConnectionError, TimeoutError):
                assert server.poll() is None, log.read_text()[-4000:]
                time.sleep(1)
        else:
            pytest.fail(log.read_text()[-4000:])
        assert "OSCAR" in log.read_text()
        yield OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="none")
    finally:
        server.terminate()
        server.wait(60)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
def test_completion(client: OpenAI, stream: bool) -> None:
    answer = client.completions.create(
        model="demo", prompt="The capital of France is", max_tokens=8, temperature=0, stream=stream
    )
    text = "".join(part.choices[0].text for part in answer) if stream else answer.choices[0].text
    assert "Paris" in text


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streaming"])
def test_chat(client: OpenAI, stream: bool) -> None:
    messages = [{"role": "user", "content": "What is the opposite of hot?"}]
    answer = client.chat.completions.create(
        model="demo", messages=messages, max_tokens=16, temperature=0, stream=stream
    )
    if stream:
        text = "".join(part.choices[0].delta.content or "" for part in answer)
    else:
        text = answer.choices[0].message.content
    assert "cold" in text
