"""Mixed load on a running server: short and long prompts, common prefixes, clients that leave in the middle.

    vllm serve MODEL --attention-backend OSCAR &
    python ci/load.py http://127.0.0.1:8000 [--minutes 8] [--clients 64] [--longest 1500] [--json FILE]

Ends with status 1 after an error, a stall, or a request or block that is still held when every client is gone. Fixed
prompts are answered alone, again, all together, under the load and after it; told is how many answers differ. The
script knows nothing of caches: a stock server under the same load tells what of that is not OSCAR's.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import aiohttp

from oscar_vllm.calibration.text import default_text, held_out_text

STALL_SECONDS = 120
FIXED_WORDS = (10, 40, 100, 200, 300, 20, 60, 150) * 2
FIXED_TOKENS = 48
KINDS = {"short": 3, "long": 2, "prefix": 3, "leave": 1.5, "leave the queue": 0.5, "fixed": 2}
"""What a client does next, and how often."""
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
COUNTERS = ("num_preemptions_total", "prefix_cache_hits_total", "prefix_cache_queries_total")
FAILURES = (RuntimeError, OSError, TimeoutError, aiohttp.ClientError, ValueError, KeyError)
"""What a request, or reading the metrics, may end in."""


class Load:
    """Clients of one server, and what happened to them."""

    def __init__(self, session: aiohttp.ClientSession, url: str, longest: int, stall: float = STALL_SECONDS) -> None:
        self.session, self.url, self.longest, self.stall = session, url, longest, stall
        self.model = ""
        self.words = (held_out_text() + " " + default_text()).split(" ")
        fixed, shared = random.Random(7), random.Random(8)
        self.fixed = [self.text(fixed, count) + "\n\nExplain the text above." for count in FIXED_WORDS]
        self.prefixes = [self.text(shared, longest // 3) for _ in range(4)]
        self.done: Counter[str] = Counter()
        self.left = 0
        self.tokens = 0
        self.first: list[float] = []
        """Seconds to the first token."""
        self.errors: list[str] = []
        self.loaded: list[tuple[int, str]] = []
        """(fixed prompt, answer) under load."""

    def text(self, choice: random.Random, count: int) -> str:
        start = choice.randrange(max(1, len(self.words) - count))
        return " ".join(self.words[start : start + count])

    async def ask(self, prompt: str, tokens: int, leave_after: int | None = None) -> str | None:
        """The streamed answer to a prompt; None where the client left after so many pieces of it.

        Raises:
            RuntimeError: the server refused, sent an error or ended the stream early.
            TimeoutError: nothing came for the time of a stall.
        """
        body = {
            "model": self.model, "messages": [{"role": "user", "content": prompt}], "temperature": 0,
            "max_tokens": tokens, "stream": True, "ignore_eos": True,
        }  # fmt: skip
        pieces: list[str] = []
        start = time.monotonic()
        async with self.session.post(self.url + "/v1/chat/completions", json=body) as response:
            if response.status != 200:
                raise RuntimeError(f"status {response.status}: {(await response.text())[:200]}")
            while line := await asyncio.wait_for(response.content.readline(), self.stall):
                event = line.removeprefix(b"data: ").strip()
                if event == b"[DONE]":
                    return "".join(pieces)
                if event == line.strip():  # no event: an empty line between two
                    continue
                data = json.loads(event)
                if "error" in data:
                    raise RuntimeError(str(data["error"])[:200])
                piece = data["choices"][0]["delta"].get("content") if data["choices"] else None
                if not piece:
                    continue
                if not pieces:
                    self.first.append(time.monotonic() - start)
                self.tokens += 1
                pieces.append(piece)
                if len(pieces) == leave_after:
                    response.close()
                    return None
        raise RuntimeError("the stream ended early")

    async def alone(self) -> list[str | None]:
        """Answers to the fixed prompts, one by one."""
        return [await self.ask(prompt, FIXED_TOKENS) for prompt in self.fixed]

    async def together(self) -> list[str | None]:
        """Answers to the fixed prompts, all at once."""
        return list(await asyncio.gather(*(self.ask(prompt, FIXED_TOKENS) for prompt in self.fixed)))

    async def client(self, seed: int, until: float) -> None:
        """One request after another until a time."""
        choice = random.Random(seed)
        while time.monotonic() < until:
            kind = choice.choices(list(KINDS), list(KINDS.values()))[0]
            try:
                await self._one(kind, choice)
                self.done[kind] += 1
            except FAILURES as error:
                self.errors.append(f"{kind}: {type(error).__name__}: {error}"[:300])
                await asyncio.sleep(0.2)

    async def _one(self, kind: str, choice: random.Random) -> None:
        longest = self.longest
        if kind == "short":
            await self.ask(self.text(choice, choice.randint(3, 60)), choice.randint(8, 64))
        elif kind == "long":
            text = self.text(choice, choice.randint(longest // 4, longest))
            await self.ask(text + "\n\nSummarize.", choice.randint(16, 96))
        elif kind == "prefix":
            question = f"\n\nQuestion {choice.randrange(1000)}: what is it about?"
            await self.ask(choice.choice(self.prefixes) + question, choice.randint(16, 64))
        elif kind == "fixed":
            which = choice.randrange(len(self.fixed))
            answer = await self.ask(self.fixed[which], FIXED_TOKENS)
            assert answer is not None
            self.loaded.append((which, answer))
        elif kind == "leave":
            self.left += 1
            text = self.text(choice, choice.randint(20, longest // 2))
            await self.ask(text, 200, leave_after=choice.randint(1, 20))
        else:  # gone before the answer, or its first token
            self.left += 1
            request = asyncio.ensure_future(self.ask(self.text(choice, choice.randint(20, longest)), 100))
            done, _ = await asyncio.wait([request], timeout=choice.uniform(0.01, 0.5))
            if not done:
                request.cancel()
            await asyncio.gather(request, return_exceptions=not done)

    async def metrics(self) -> dict[str, float]:
        """vLLM's counters and gauges, summed over their labels."""
        async with self.session.get(self.url + "/metrics") as response:
            text = await response.text()

        def total(name: str) -> float:
            return sum(float(x) for x in re.findall(rf"^vllm:{name}(?:\{{[^}}]*\}})? (\S+)$", text, re.M))

        return {name: total(name) for name in (*GAUGES, *COUNTERS)}

    async def wait_until_idle(self, seconds: float = 60) -> dict[str, float]:
        """The metrics when nothing is held any more, or as they are after so long."""
        end = time.monotonic() + seconds
        while True:
            found = await self.metrics()
            if time.monotonic() > end or not any(found[name] for name in GAUGES):
                return found
            await asyncio.sleep(1)


def differing(one: list[Any], other: list[Any]) -> float:
    """Share of answers that differ, %."""
    return 100 * sum(a != b for a, b in zip(one, other, strict=True)) / max(1, len(one))


def quantile(times: list[float], share: float) -> float:
    """Of the times, in seconds; 0 of none."""
    return sorted(times)[min(len(times) - 1, int(share * len(times)))] if times else 0.0


async def run(url: str, seconds: float, clients: int, longest: int, stall: float = STALL_SECONDS) -> dict[str, Any]:
    """Load the server and return what is reported; ``problems`` is empty if all is well."""
    unlimited = aiohttp.ClientTimeout(total=None)
    async with aiohttp.ClientSession(timeout=unlimited, connector=aiohttp.TCPConnector(limit=0)) as session:
        load = Load(session, url, longest, stall)
        async with session.get(url + "/v1/models") as response:
            load.model = (await response.json())["data"][0]["id"]
        alone, again, together = await load.alone(), await load.alone(), await load.together()
        load.first.clear()
        until = time.monotonic() + seconds
        await asyncio.gather(*(load.client(seed, until) for seed in range(clients)))
        first = list(load.first)
        idle: dict[str, float] = {}
        after: list[str | None] = [None] * len(load.fixed)
        try:
            idle = await load.wait_until_idle()
            after = await load.alone()
        except FAILURES as error:  # what is known of the load is told all the same
            load.errors.append(f"after the load: {type(error).__name__}: {error}"[:300])
    under = [answer for _, answer in load.loaded]
    held = [f"{name} is {idle[name]:g} when every client is gone" for name in GAUGES if idle.get(name)]
    return {
        "requests": dict(load.done),
        "clients that left": load.left,
        "seconds to the first token, median / 99 % / longest": [
            round(quantile(first, share), 2) for share in (0.5, 0.99, 1)
        ],
        "metrics": idle,
        "answers that differ, %": {
            "alone / again": differing(alone, again),
            "alone / together": differing(alone, together),
            "alone / under load": differing([alone[which] for which, _ in load.loaded], under),
            "again / after": differing(again, after),
        },
        "answers under load": len(under),
        "problems": load.errors + held,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("url")
    parser.add_argument("--minutes", type=float, default=8)
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--longest", type=int, default=1500, help="words of the longest prompt")
    parser.add_argument("--json", type=Path, help="also write the report there")
    arguments = parser.parse_args()
    try:
        report = asyncio.run(run(arguments.url, 60 * arguments.minutes, arguments.clients, arguments.longest))
    except FAILURES as error:
        sys.exit(f"The server at {arguments.url} did not answer before the load; look at its log ({error}).")
    text = json.dumps(report, indent=1)
    print(text)
    if arguments.json:
        arguments.json.write_text(text)
    sys.exit(bool(report["problems"]))


if __name__ == "__main__":
    main()
