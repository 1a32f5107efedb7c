"""Request sent to a server, on an idle connection or on a new one, until its answer is complete."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Protocol

from banaserve.base.net.sockets import is_own_fault
from banaserve_route.balancer.http.replica_connection import (
    ConnectionPool,
    ReplicaConnection,
    Sink,
)
from banaserve_route.balancer.http.request import ClientRequest
from banaserve_route.balancer.http.response import (
    BodyEnd,
    ChunkDecoder,
    ResponseHead,
    UntilClose,
    without,
)


class Exchange(Protocol):
    """Request sent to a server, as the attempt sees it."""

    def end(self) -> None:
        """Learn that the answer is complete: the connection serves other requests."""
        ...

    def drop(self) -> None:
        """Close the connection: its further bytes are of no use."""
        ...

    def pause(self) -> None:
        """Stop reading the answer: the client is slower than the server."""
        ...

    def resume(self) -> None: ...


class ReplicaExchange:
    """Request sent from this process; it begins when the object is created."""

    __slots__ = ("_connecting", "_is_over", "_pool", "_upstream")

    def __init__(
        self, pool: ConnectionPool, message: ClientRequest, fields: bytes, sink: Sink
    ) -> None:
        """
        Args:
            fields: Header lines that only this hop needs.
            sink: Receiver of the answer.
        """
        parts, to_head = message.parts(fields), message.method == b"HEAD"
        sink = _WithoutChunks(sink) if message.is_http10 else sink
        self._pool, self._is_over = pool, False
        self._connecting: asyncio.Task[None] | None = None
        self._upstream: ReplicaConnection | None = pool.take()
        if self._upstream is not None:
            self._upstream.send(parts, sink, to_head)
        else:
            connecting = self._connect(parts, sink, to_head)
            self._connecting = asyncio.get_running_loop().create_task(connecting)

    async def _connect(self, parts: list[bytes], sink: Sink, to_head: bool) -> None:
        try:
            upstream = await self._pool.connect()
        except OSError as error:
            if not self._is_over:
                why = "timed out" if isinstance(error, TimeoutError) else error.strerror or "failed"
                why, is_ours = f"cannot connect ({why.lower()})", is_own_fault(error)
                sink.on_broken(why, was_reused=False, is_ours=is_ours)
            return
        if self._is_over:
            self._pool.give_back(upstream)
        else:
            self._upstream = upstream
            upstream.send(parts, sink, to_head)

    def end(self) -> None:
        self._is_over = True
        self._upstream = None

    def drop(self) -> None:
        upstream = self._upstream
        if self._connecting is not None:
            self._connecting.cancel()
        self.end()
        if upstream is not None:
            upstream.abort()

    def pause(self) -> None:
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        if self._upstream is not None:
            self._upstream.resume()


class _WithoutChunks:
    """Sink for a client of HTTP/1.0, which cannot read chunks: the body ends by the connection."""

    def __init__(self, sink: Sink) -> None:
        self._sink = sink
        self._decoder: ChunkDecoder | None = None
        self.on_end, self.on_broken = sink.on_end, sink.on_broken

    def on_head(self, head: ResponseHead, data: bytes) -> None:
        if head.body.ends_by is BodyEnd.LAST_CHUNK:
            self._decoder = ChunkDecoder()
            data = self._decoder.decode(data)
            head = replace(head, body=UntilClose(), is_events=False)
        lines = without(head.lines, {b"transfer-encoding"})
        self._sink.on_head(replace(head, lines=lines), data)

    def on_body(self, data: bytes) -> None:
        if self._decoder is not None:
            data = self._decoder.decode(data)
        if data:
            self._sink.on_body(data)
