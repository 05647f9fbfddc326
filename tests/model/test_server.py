"""``vllm serve`` on this machine, asked by the openai client."""

import os
import re
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

from oscar_vllm.recipe import OscarRecipe

START_SECONDS = 240


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


@pytest.fixture(scope="module")
def server(model: str, recipe: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, Path]]:
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
        process = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment)
    try:
        for _ in range(START_SECONDS):
            try:
                urlopen(f"http://127.0.0.1:{port}/health", timeout=5).close()
                break
            except (URLError, ConnectionError, TimeoutError):
                assert process.poll() is None, log.read_text()[-4000:]
                time.sleep(1)
        else:
            pytest.fail(log.read_text()[-4000:])
        yield f"http://127.0.0.1:{port}", log
    finally:
        process.terminate()
        try:
            process.wait(60)
        except subprocess.TimeoutExpired:
            process.kill()


@pytest.fixture(scope="module")
def client(server: tuple[str, Path]) -> OpenAI:
    return OpenAI(base_url=f"{server[0]}/v1", api_key="none")


def test_start_up_log_tells_what_is_served(server: tuple[str, Path], recipe: Path) -> None:
    block = re.search(
        r"OSCAR recipe ([0-9a-f]{12}): \S+, calibrated on [\d,]+ tokens, centered.*"
        r"OSCAR cache: sink 64 \| history INT2, page format 1 \| recent 256, (\d\.\d\d) bits per element at 2,048 tok.*"
        r"OSCAR memory: ([\d,]+) KV tokens in requests of 2,048, (\d\.\d) times what a 16-bit cache holds",
        server[1].read_text(),
        re.DOTALL,
    )
    assert block is not None
    assert block[1] == OscarRecipe.load(recipe).content_hash()[:12]


def test_metrics_tell_what_the_cache_holds(server: tuple[str, Path]) -> None:
    metrics = urlopen(f"{server[0]}/metrics", timeout=10).read().decode()
    log = server[1].read_text()
    tokens = re.search(r"OSCAR memory: ([\d,]+) KV tokens", log)
    bits = re.search(r"recent 256, (\d\.\d\d) bits per element", log)
    assert tokens is not None
    assert bits is not None
    labels = r'\{engine="0",model_name="demo"\}'
    assert float(re.search(rf"oscar:kv_tokens{labels} (\S+)", metrics)[1]) == int(tokens[1].replace(",", ""))
    assert float(re.search(rf"oscar:bits_per_element{labels} (\S+)", metrics)[1]) == pytest.approx(
        float(bits[1]), abs=0.005
    )


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


def test_the_client_example(server: tuple[str, Path]) -> None:
    """A short document and two questions, to the end."""
    command = [sys.executable, str(Path(__file__).parents[2] / "examples" / "openai_client.py")]
    command += ["--url", f"{server[0]}/v1", "--characters", "1500", "What is this?", "Who wrote it?"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    answers = re.findall(r"> (.*?\?)\n(.+?)\n  \[first token after (\d+) ms\]", done.stdout, re.DOTALL)
    assert [question for question, _, _ in answers] == ["What is this?", "Who wrote it?"]
    assert all(text.strip() and int(milliseconds) > 0 for _, text, milliseconds in answers)
