"""Load a real server and see that nothing is lost: fixed prompts are answered the same before, in and after the load.

    python ci/soak.py [--minutes 10] [--clients 24]

The server has a block pool for a fraction of what the clients ask for. Clients send prompts with and without a common
prefix, stop reading in the middle of a stream, abort and send what no server should accept. At the end the server has
no request and no block in use, its log has no error, and the prompts of the start are answered to the bit: the same
text with the same log-probabilities.
"""

import argparse
import json
import random
import socket
import struct
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

from server import NAME, Server

from oscar_vllm.demo.model import ensure_demo_model

POOL = 64
"""Blocks: one of the longest requests and a half, or three short ones, where 24 clients wait."""
LENGTH = 1024
FIXED = {
    "The capital of France is": "Paris",
    "Q: What is the opposite of hot?\nA:": "cold",
    "The days of the week are Monday, Tuesday, Wednesday,": "Thursday",
    "1, 2, 3, 4, 5, 6, 7,": "8",
}
"""Prompts whose next words leave no doubt, and what must be among them whatever else is in the batch."""
MALFORMED: list[bytes] = [
    b"",
    b"{",
    b"[1, 2]",
    json.dumps({"model": NAME}).encode(),
    json.dumps({"model": "another", "prompt": "a"}).encode(),
    json.dumps({"model": NAME, "prompt": "a", "max_tokens": -1}).encode(),
    json.dumps({"model": NAME, "prompt": "a", "temperature": "hot"}).encode(),
    json.dumps({"model": NAME, "prompt": {"a": 1}}).encode(),
    json.dumps({"model": NAME, "prompt": [10**9] * 4}).encode(),
    json.dumps({"model": NAME, "prompt": [5] * (LENGTH + 1)}).encode(),
    json.dumps({"model": NAME, "prompt": "a", "n": -3}).encode(),
]


class Load:
    """Clients of one server until a time."""

    def __init__(self, server: Server, until: float) -> None:
        self.server = server
        self.until = until
        self.done: Counter[str] = Counter()
        self.problems: list[str] = []

    def run(self, clients: int) -> None:
        threads = [threading.Thread(target=self._client, args=(seed,)) for seed in range(clients)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    def _client(self, seed: int) -> None:
        choice = random.Random(seed)
        actions = [self._fixed, self._whole, self._whole, self._leave, self._leave, self._malformed]
        while time.monotonic() < self.until and not self.problems:
            action = choice.choice(actions)
            try:
                action(choice)
            except (OSError, RuntimeError, KeyError, ValueError) as error:
                self.problems.append(f"{action.__name__[1:]}: {type(error).__name__}: {error}")
                return
            self.done[action.__name__[1:]] += 1

    def _prompt(self, choice: random.Random) -> list[int]:
        shared = choice.choice([0, 0, 130, 300, 520])
        own = choice.choice([1, 16, 40, 200, 400])
        return [100 + i * i % 900 for i in range(shared)] + [choice.randrange(100, 40_000) for _ in range(own)]

    def _fixed(self, choice: random.Random) -> None:
        prompt = choice.choice(list(FIXED))
        text = self.server.complete(prompt, 8)["text"]
        if FIXED[prompt] not in text:
            self.problems.append(f"{prompt!r} was answered {text!r}")

    def _whole(self, choice: random.Random) -> None:
        tokens = choice.randrange(1, 60)
        connection, events = self.server.stream(self._prompt(choice), tokens, ignore_eos=True)
        received = list(events)
        connection.close()
        if received[-1] != b"[DONE]" or b'"finish_reason":"length"' not in b"".join(received).replace(b" ", b""):
            self.problems.append(f"a stream ended with {received[-1]!r}")

    def _leave(self, choice: random.Random) -> None:
        """Go away in the middle of a stream, as a client does that is killed."""
        connection, events = self.server.stream(self._prompt(choice), 200, ignore_eos=True)
        for _ in range(choice.randrange(0, 12)):
            next(events, None)
        if connection.sock is not None:
            connection.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()

    def _malformed(self, choice: random.Random) -> None:
        body = choice.choice(MALFORMED)
        status, answer = self.server.send("POST", "/v1/completions", body)
        if not 400 <= status < 500:
            self.problems.append(f"{body[:80]!r} was answered {status}: {answer[:200]!r}")


def answers(server: Server, salt: str) -> list[Any]:
    """Text and log-probabilities of the fixed prompts and of long ones, each alone and without a prefix hit."""
    long = [[100 + (base * 31 + i * i) % 900 for i in range(700)] for base in range(3)]
    results = []
    for prompt in [*FIXED, *long]:
        choice = server.complete(prompt, 24, logprobs=1, cache_salt=salt, ignore_eos=True)
        results.append((choice["text"], choice["logprobs"]["token_logprobs"]))
    return results


def wait_until_idle(server: Server, seconds: float = 60) -> list[str]:
    """What is still in use when every client is gone."""
    gauges = ["vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"]
    end = time.monotonic() + seconds
    while True:
        left = [f"{name} is {value:g}" for name in gauges if (value := server.metric(name)) != 0]
        if not left or time.monotonic() > end:
            return left
        time.sleep(1)


def soak(minutes: float, clients: int, log: Path) -> list[str]:
    """Load a server; the problems found, none if all is well."""
    options = ["--max-model-len", str(LENGTH), "--max-num-seqs", "12", "--num-gpu-blocks-override", str(POOL)]
    options += ["--max-num-batched-tokens", "512", "--enforce-eager", "--disable-uvicorn-access-log"]
    options += ["--additional-config", '{"oscar": {"recipe": "hadamard"}}']
    with Server(str(ensure_demo_model()), log, options) as server:
        before = answers(server, "before")
        load = Load(server, time.monotonic() + 60 * minutes)
        load.run(clients)
        problems = load.problems + wait_until_idle(server)
        if answers(server, "after") != before:
            problems.append("the fixed prompts are answered differently after the load")
        # Read while the server runs: how vLLM ends its processes is told in its log as an error.
        problems += [line for line in log.read_text().splitlines() if "ERROR" in line or "Traceback" in line][:5]
        hits, preemptions = server.metric("vllm:prefix_cache_hits_total"), server.metric("vllm:num_preemptions_total")
        if not hits or not preemptions:
            problems.append(f"the load was too light: {hits:g} tokens of prefix hits, {preemptions:g} preemptions")
    print(f"{dict(load.done)}; {hits:,.0f} tokens of prefix hits, {preemptions:,.0f} preemptions")
    return problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=10)
    parser.add_argument("--clients", type=int, default=24)
    parser.add_argument("--log", type=Path, help="where the server's log goes")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        problems = soak(arguments.minutes, arguments.clients, arguments.log or Path(folder) / "log")
    for problem in problems:
        print(problem, file=sys.stderr)
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
