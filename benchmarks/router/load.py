"""Load on a router, of whose answers only the status is read."""

from __future__ import annotations

import asyncio
import json
import random
from time import monotonic

from banaserve.base.errors import BanaServeError
from banaserve_bench.loadgen.http import HttpExchange, HttpStreams
from banaserve_bench.loadgen.loops import side_by_side

PREFIX_WORDS = 150
"""Number of words in a prefix of about 600 bytes; eight groups of requests share one each."""


def bodies(num_requests: int, seed: int, is_stream: bool) -> list[bytes]:
    """Return bodies whose prompts have one of eight beginnings, as conversations do."""
    generator = random.Random(seed)
    words = [f"{generator.randrange(1000):03d}" for _ in range(8 * PREFIX_WORDS)]
    made = []
    for number in range(num_requests):
        group = generator.randrange(8)
        prefix = " ".join(words[group * PREFIX_WORDS : (group + 1) * PREFIX_WORDS])
        body = {"model": "mock", "prompt": f"{prefix} {number} {generator.random()}"}
        made.append(json.dumps({**body, "max_tokens": 64, "stream": is_stream}).encode())
    return made


class _Answer(HttpExchange):
    """Answer of which only the status counts."""

    def on_status(self, status: int) -> None:
        self.status = status


async def _ask(streams: HttpStreams, body: bytes) -> None:
    answer = _Answer()
    await streams.post("/v1/completions", {"Content-Type": "application/json"}, body, answer)
    if answer.status != 200:
        raise BanaServeError(f"the router answered {answer.status}")


async def closed_loop(url: str, asked: list[bytes], num_callers: int) -> list[float]:
    """Send ``asked`` over ``num_callers`` connections; return latencies in seconds.

    Raises:
        BanaServeError: A request was refused.
        OSError: The router closed a connection.
    """
    streams = HttpStreams(url)

    async def latency_s(body: bytes) -> float:
        began_s = monotonic()
        await _ask(streams, body)
        return monotonic() - began_s

    latencies_s = await side_by_side(latency_s, asked, num_callers)
    streams.close()
    return latencies_s


async def open_loop(url: str, asked: list[bytes], per_s: float) -> list[float]:
    """Send one request each ``1 / per_s`` seconds; return latencies from the due times."""
    latencies_s: list[float] = []
    streams = HttpStreams(url)

    async def one(body: bytes, due_s: float) -> None:
        await _ask(streams, body)
        latencies_s.append(monotonic() - due_s)

    began_s = monotonic()
    async with asyncio.TaskGroup() as group:
        for number, body in enumerate(asked):
            due_s = began_s + number / per_s
            await asyncio.sleep(max(0.0, due_s - monotonic()))
            group.create_task(one(body, due_s))
    streams.close()
    return latencies_s
