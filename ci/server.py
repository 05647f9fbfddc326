"""An OpenAI-compatible server with the OSCAR backend on this machine, in processes of its own."""

import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from typing import Any

START_SECONDS = 300
NAME = "served"


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])


class Server:
    """``with Server(model, log, options) as server``: started, healthy, and ended with all its processes."""

    def __init__(self, model: str, log: Path, options: list[str], environment: dict[str, str] | None = None) -> None:
        self.port = free_port()
        self.log = log
        self.command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]
        self.command += ["--served-model-name", NAME, "--host", "127.0.0.1", "--port", str(self.port)]
        self.command += ["--attention-backend", "OSCAR", *options]
        self.environment = {**os.environ, "VLLM_CPU_KVCACHE_SPACE": "1", **(environment or {})}
        self.environment.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        self.environment["VLLM_LOGGING_LEVEL"] = "INFO"

    def __enter__(self) -> "Server":
        with self.log.open("w") as output:
            # A session of its own: what is left of it at the end can be ended with it.
            self.process = subprocess.Popen(
                self.command, stdout=output, stderr=subprocess.STDOUT, env=self.environment, start_new_session=True
            )
        for _ in range(START_SECONDS):
            if self.process.poll() is not None:
                break
            if self.healthy():
                return self
            time.sleep(1)
        self.stop()
        raise RuntimeError(f"the server did not start:\n{self.log.read_text()[-4000:]}")

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> int:
        """End the server as a terminal would; its exit status."""
        if self.process.poll() is None:
            self.process.terminate()
        try:
            return self.process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            return self.process.wait(10)

    def healthy(self) -> bool:
        try:
            return self.send("GET", "/health", timeout=5)[0] == 200
        except OSError:
            return False

    def send(self, method: str, path: str, body: bytes | None = None, timeout: float = 300) -> tuple[int, bytes]:
        """Status and body of one request."""
        connection = HTTPConnection("127.0.0.1", self.port, timeout=timeout)
        try:
            connection.request(method, path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def complete(self, prompt: Any, tokens: int, **options: Any) -> dict[str, Any]:
        """The greedy completion of a prompt (text or token ids): ``{"text": ..., "finish_reason": ..., ...}``."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, **options}
        status, answer = self.send("POST", "/v1/completions", json.dumps(body).encode())
        if status != 200:
            raise RuntimeError(f"the server answered {status}: {answer[:300]!r}")
        choice: dict[str, Any] = json.loads(answer)["choices"][0]
        return choice

    def stream(self, prompt: Any, tokens: int, **options: Any) -> tuple[HTTPConnection, Iterator[bytes]]:
        """An open connection and the events of a streamed completion, ``[DONE]`` the last if all went well."""
        body = {"model": NAME, "prompt": prompt, "max_tokens": tokens, "temperature": 0, "stream": True, **options}
        connection = HTTPConnection("127.0.0.1", self.port, timeout=300)
        connection.request("POST", "/v1/completions", json.dumps(body), {"Content-Type": "application/json"})
        response = connection.getresponse()
        if response.status != 200:
            raise RuntimeError(f"the server answered {response.status}: {response.read()[:300]!r}")
        return connection, _events(response)

    def metric(self, name: str) -> float:
        """The sum of a metric over its labels."""
        lines = self.send("GET", "/metrics")[1].decode().splitlines()
        return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.split("{")[0] == name)

    def descendants(self) -> dict[int, str]:
        """Names of the processes below the server's, by id."""
        parents: dict[int, int] = {}
        names: dict[int, str] = {}
        for entry in Path("/proc").iterdir():
            try:
                fields = (entry / "stat").read_text()
            except (OSError, ValueError):
                continue
            if not entry.name.isdigit():
                continue
            name, rest = fields[fields.index("(") + 1 :].rsplit(")", 1)
            parents[int(entry.name)], names[int(entry.name)] = int(rest.split()[1]), name
        found = {self.process.pid}
        while True:
            more = {process for process, parent in parents.items() if parent in found} - found
            if not more:
                break
            found |= more
        return {process: names[process] for process in found - {self.process.pid}}


def _events(response: HTTPResponse) -> Iterator[bytes]:
    for line in response:
        if line.startswith(b"data: "):
            yield line.removeprefix(b"data: ").strip()
