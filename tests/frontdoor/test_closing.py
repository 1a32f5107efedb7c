"""The end of a server: requests under way come to theirs, and no others come."""

from __future__ import annotations

import asyncio
import os
import signal
from typing import Any

import httpx
import pytest

from banaserve.frontdoor.lifecycle.closing import ClosingMiddleware, StopSignals
from waiting import turns


class App:
    """Answers a POST request when it is let, anything else at once."""

    def __init__(self) -> None:
        self.may_end = asyncio.Event()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        if scope["method"] == "POST":
            await self.may_end.wait()
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"done"})


def client(middleware: ClosingMiddleware) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.ASGITransport(middleware), base_url="http://door")


async def test_what_is_under_way_ends_and_nothing_else_begins() -> None:
    app = App()
    middleware, now = ClosingMiddleware(app), asyncio.Event()
    async with client(middleware) as asks:
        first = asyncio.create_task(asks.post("/v1/completions"))
        await turns(lambda: middleware.num_requests == 1)
        closing = asyncio.create_task(middleware.close(600.0, now, lambda: True))
        await asyncio.sleep(0)
        refused, ready = await asks.post("/v1/completions"), await asks.get("/ready")
        assert (refused.status_code, refused.headers["retry-after"]) == (503, "1")
        assert (ready.status_code, ready.json()["ready"]) == (503, False)
        assert (await asks.get("/metrics")).status_code == 200
        assert not closing.done()
        app.may_end.set()
        await asyncio.wait_for(closing, 60)
        assert (await first).text == "done"


@pytest.mark.parametrize(
    ("timeout_s", "is_now", "serves"),
    [(0.0, False, True), (600.0, True, True), (600.0, False, False)],
)
async def test_nothing_is_waited_for_in_vain(timeout_s: float, is_now: bool, serves: bool) -> None:
    app = App()
    middleware, now = ClosingMiddleware(app), asyncio.Event()
    async with client(middleware) as asks:
        first = asyncio.create_task(asks.post("/v1/completions"))
        await turns(lambda: middleware.num_requests == 1)
        if is_now:
            now.set()
        await asyncio.wait_for(middleware.close(timeout_s, now, lambda: serves), 60)
        assert not first.done()
        app.may_end.set()
        await first


@pytest.mark.parametrize(
    ("numbers", "is_now"),
    [
        ([signal.SIGTERM], False),
        ([signal.SIGTERM, signal.SIGTERM], True),
        ([signal.SIGINT], True),
        ([signal.SIGTERM, signal.SIGINT], True),
    ],
)
async def test_a_second_signal_ends_it_now(numbers: list[signal.Signals], is_now: bool) -> None:
    signals, loop = StopSignals(), asyncio.get_running_loop()
    try:
        for number in numbers:
            os.kill(os.getpid(), number)
            await asyncio.wait_for(signals.stop.wait(), 60)
        if is_now:
            await asyncio.wait_for(signals.now.wait(), 60)
        # One that says both has said both at once: nothing comes later.
        assert signals.now.is_set() is is_now
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.remove_signal_handler(number)
