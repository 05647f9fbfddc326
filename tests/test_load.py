"""The load script against a server of a few lines: what it reports, and that it sees what goes wrong."""

import asyncio
import json
import sys
from collections.abc import Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from scripts import load_script

Handler = Callable[[dict[str, Any], web.StreamResponse], Awaitable[None]]


@pytest.fixture(scope="module")
def script() -> Any:
    return load_script("ci/load.py")


async def send(response: web.StreamResponse, piece: str) -> None:
    event = {"choices": [{"delta": {"content": piece}}]}
    await response.write(b"data: " + json.dumps(event).encode() + b"\n\n")


async def whole(body: dict[str, Any], response: web.StreamResponse) -> None:
    """Three pieces that depend on the prompt alone."""
    for i in range(3):
        await send(response, f"{len(body['messages'][0]['content'])}.{i} ")
        await asyncio.sleep(0.002)
    await response.write(b"data: [DONE]\n\n")


async def without_end(body: dict[str, Any], response: web.StreamResponse) -> None:
    await send(response, "a")


async def silent(body: dict[str, Any], response: web.StreamResponse) -> None:
    await send(response, "a")
    await asyncio.sleep(5)


async def failing(body: dict[str, Any], response: web.StreamResponse) -> None:
    await response.write(b'data: {"error": "out of blocks"}\n\n')


def report(script: Any, handler: Handler, *, under_load: Handler | None = None, held: float = 0.0) -> dict[str, Any]:
    """What the script says of half a second against a server; it answers otherwise from the 48th request on."""

    async def measure() -> dict[str, Any]:
        asked = 0

        async def complete(request: web.Request) -> web.StreamResponse:
            nonlocal asked
            asked += 1
            response = web.StreamResponse()
            await response.prepare(request)
            fixed = 3 * len(script.FIXED_WORDS)  # alone, again, together
            await (handler if under_load is None or asked <= fixed else under_load)(await request.json(), response)
            return response

        async def metrics(request: web.Request) -> web.Response:
            return web.Response(text=f'vllm:kv_cache_usage_perc{{engine="0"}} {held}\nvllm:num_preemptions_total 4.0\n')

        async def models(request: web.Request) -> web.Response:
            return web.json_response({"data": [{"id": "served"}]})

        app = web.Application()
        app.add_routes([web.post("/v1/chat/completions", complete)])
        app.add_routes([web.get("/metrics", metrics), web.get("/v1/models", models)])
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        port = runner.addresses[0][1]
        try:
            found: dict[str, Any] = await script.run(f"http://127.0.0.1:{port}", 0.5, 4, 90, stall=0.2)
            return found
        finally:
            await runner.cleanup()

    return asyncio.run(measure())


def test_a_server_that_answers_is_well(script: Any) -> None:
    found = report(script, whole)
    assert found["problems"] == []
    assert set(found["requests"]) == set(script.KINDS)
    assert set(found["answers that differ, %"].values()) == {0}
    assert found["answers under load"] > 0
    assert found["metrics"]["num_preemptions_total"] == 4


def test_answers_that_differ_under_load_are_counted(script: Any) -> None:
    async def other(body: dict[str, Any], response: web.StreamResponse) -> None:
        await send(response, "something else")
        await response.write(b"data: [DONE]\n\n")

    shares = report(script, whole, under_load=other)["answers that differ, %"]
    assert shares == {"alone / again": 0, "alone / together": 0, "alone / under load": 100, "again / after": 100}


@pytest.mark.parametrize(
    ("handler", "expected"),
    [(without_end, "ended early"), (silent, "TimeoutError"), (failing, "out of blocks")],
    ids=["a stream without an end", "a stall", "an error in the stream"],
)
def test_what_goes_wrong_is_a_problem(script: Any, handler: Handler, expected: str) -> None:
    async def all_right_at_last(body: dict[str, Any], response: web.StreamResponse) -> None:
        # The fixed prompts after the load: the report is about the load, not about them.
        await (whole if "Explain" in body["messages"][0]["content"] else handler)(body, response)

    problems = report(script, whole, under_load=all_right_at_last)["problems"]
    assert problems
    assert all(expected in problem for problem in problems)


def test_blocks_that_stay_are_a_problem(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def at_once(load: Any) -> Any:
        return await load.metrics()

    monkeypatch.setattr(script.Load, "wait_until_idle", at_once)
    assert report(script, whole, held=0.25)["problems"] == ["kv_cache_usage_perc is 0.25 when every client is gone"]


def test_an_error_before_a_client_leaves_the_queue_is_a_problem(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def all_right_at_last(body: dict[str, Any], response: web.StreamResponse) -> None:
        await (whole if "Explain" in body["messages"][0]["content"] else failing)(body, response)

    monkeypatch.setattr(script, "KINDS", {"leave the queue": 1})
    problems = report(script, whole, under_load=all_right_at_last)["problems"]
    assert problems
    assert all("leave the queue: RuntimeError: out of blocks" in problem for problem in problems)


def test_a_server_that_is_gone_after_the_load_loses_no_report(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "KINDS", {"fixed": 1})
    found = report(script, whole, under_load=failing)
    assert found["problems"][-1] == "after the load: RuntimeError: out of blocks"
    assert found["answers that differ, %"]["again / after"] == 100


def test_no_server_is_said_in_one_sentence(script: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["load.py", "http://127.0.0.1:9"])
    with pytest.raises(SystemExit, match=r"The server at http://127\.0\.0\.1:9 did not answer before the load"):
        script.main()
