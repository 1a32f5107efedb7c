"""Small requests of the balancer's own: looks at health, metrics, peers."""

from __future__ import annotations

import asyncio
from time import monotonic
from typing import NamedTuple

from banaserve.balancer.framing import ResponseHead
from banaserve.balancer.upstream import Pool, Upstream

MAX_ANSWER_BYTES = 4 * 1024 * 1024


class Answer(NamedTuple):
    """An answer and how long it took on an open connection, in milliseconds."""

    status: int
    body: bytes
    took_ms: float


class _Collector:
    """A sink that keeps everything."""

    def __init__(self, upstream: Upstream) -> None:
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.status = 0
        self.was_reused = False
        self.parts: list[bytes] = []
        self._size = 0
        self._upstream = upstream

    def on_head(self, head: ResponseHead, data: bytes) -> None:
        self.status = head.status
        self.on_body(data)

    def on_body(self, data: bytes) -> None:
        self._size += len(data)
        self.parts.append(data)
        if self._size > MAX_ANSWER_BYTES:
            self._upstream.abort()
            self._fail(f"the answer exceeds {MAX_ANSWER_BYTES} bytes")

    def on_end(self) -> None:
        if not self.done.done():
            self.done.set_result(None)

    def on_broken(self, why: str, was_reused: bool) -> None:
        self.was_reused = was_reused
        self._fail(why)

    def _fail(self, why: str) -> None:
        if not self.done.done():
            self.done.set_exception(ConnectionError(why))


async def fetch(
    pool: Pool, method: str, path: str, fields: bytes, timeout_s: float, body: bytes = b""
) -> Answer:
    """Returns the answer to one small request.

    A chunked body comes as it was framed: enough for reading numbers out of it.

    Args:
        fields: Header lines, with Host.

    Raises:
        OSError: No answer, or not in time.
    """
    length = b"Content-Length: %d\r\n" % len(body) if method != "GET" else b""
    start = b"%b %b HTTP/1.1\r\n" % (method.encode(), path.encode())
    parts = [start, fields, length, b"\r\n", body]
    async with asyncio.timeout(timeout_s):
        answer = await _try(pool, parts)
        return answer or await _try(pool, parts, is_last=True)  # type: ignore[return-value]


async def _try(pool: Pool, parts: list[bytes], is_last: bool = False) -> Answer | None:
    """Returns None where a connection had been closed while it was idle."""
    upstream = (None if is_last else pool.take()) or await pool.connect()
    started_s = monotonic()
    sink = _Collector(upstream)
    upstream.send(parts, sink, to_head=False)
    try:
        await sink.done
    except BaseException:
        upstream.abort()
        if sink.was_reused:
            return None
        raise
    return Answer(sink.status, b"".join(sink.parts), (monotonic() - started_s) * 1e3)
