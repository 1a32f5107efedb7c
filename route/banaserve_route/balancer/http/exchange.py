"""Request sent to a server, on an idle connection or on a new one, until its answer is complete."""

from __future__ import annotations

import asyncio
from typing import Protocol

from banaserve.base.net.sockets import is_own_fault
from banaserve_route.balancer.http.replica_connection import (
    ConnectionPool,
    ReplicaConnection,
    Sink,
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

    def __init__(self, pool: ConnectionPool, parts: list[bytes], sink: Sink, to_head: bool) -> None:
        """
        Args:
            parts: Bytes of the whole request.
            sink: Receiver of the answer.
            to_head: True for a HEAD request.
        """
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
