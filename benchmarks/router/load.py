"""Load on a router: raw connections, so that the client takes little of the machine."""

from __future__ import annotations

import asyncio
import json
import random
from time import monotonic
from typing import cast

from banaserve.base.errors import BanaServeError

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


class _Caller(asyncio.Protocol):
    """A connection that reads answers just far enough to know where they end."""

    def __init__(self) -> None:
        self._data = bytearray()
        self._done: asyncio.Future[None] | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(BanaServeError("the router closed a connection"))

    async def ask(self, host: bytes, body: bytes) -> None:
        self._done = asyncio.get_running_loop().create_future()
        head = b"POST /v1/completions HTTP/1.1\r\nHost: %b\r\nContent-Type: application/json\r\n"
        self.transport.write((head + b"Content-Length: %d\r\n\r\n%b") % (host, len(body), body))
        await self._done

    def data_received(self, data: bytes) -> None:
        self._data += data
        if not self._is_whole() or self._done is None:
            return
        status = self._data[9:12]
        self._data.clear()
        if status == b"200":
            self._done.set_result(None)
        else:
            self._done.set_exception(BanaServeError(f"the router answered {status.decode()}"))

    def _is_whole(self) -> bool:
        if self._data.endswith(b"\r\n0\r\n\r\n"):
            return True
        end = self._data.find(b"\r\n\r\n")
        if end < 0:
            return False
        _, found, rest = bytes(self._data[:end]).lower().partition(b"content-length:")
        return bool(found) and len(self._data) >= end + 4 + int(rest.split(b"\r\n")[0])


async def closed_loop(port: int, asked: list[bytes], num_callers: int) -> list[float]:
    """Send ``asked`` over ``num_callers`` connections; return latencies in seconds.

    Raises:
        BanaServeError: A request failed.
    """
    left = iter(asked)
    latencies_s: list[float] = []
    host = b"127.0.0.1:%d" % port
    loop = asyncio.get_running_loop()

    async def call() -> None:
        _, caller = await loop.create_connection(_Caller, "127.0.0.1", port)
        for body in left:
            began_s = monotonic()
            await caller.ask(host, body)
            latencies_s.append(monotonic() - began_s)
        caller.transport.close()

    await asyncio.gather(*(call() for _ in range(num_callers)))
    return latencies_s


async def open_loop(port: int, asked: list[bytes], per_s: float) -> list[float]:
    """Send one request each ``1 / per_s`` seconds; return latencies from the due times."""
    host = b"127.0.0.1:%d" % port
    loop = asyncio.get_running_loop()
    idle: list[_Caller] = []
    latencies_s: list[float] = []

    async def one(body: bytes, due_s: float) -> None:
        caller = idle.pop() if idle else None
        if caller is None:
            _, caller = await loop.create_connection(_Caller, "127.0.0.1", port)
        await caller.ask(host, body)
        latencies_s.append(monotonic() - due_s)
        idle.append(caller)

    began_s = monotonic()
    tasks = []
    for number, body in enumerate(asked):
        due_s = began_s + number / per_s
        await asyncio.sleep(max(0.0, due_s - monotonic()))
        tasks.append(asyncio.create_task(one(body, due_s)))
    await asyncio.gather(*tasks)
    for caller in idle:
        caller.transport.close()
    return latencies_s
