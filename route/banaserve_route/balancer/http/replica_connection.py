"""Connections to replicas, with one answer at a time, kept open between requests."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from time import monotonic
from typing import Protocol, cast

from banaserve.base.errors import ProtocolError
from banaserve.base.net.sockets import watch_server
from banaserve.base.net.tls import Certificates
from banaserve_route.balancer.config import Endpoint
from banaserve_route.balancer.http.response import (
    MAX_HEAD_BYTES,
    Body,
    ResponseHead,
    UntilClose,
    parse_response_head,
    without_origin,
)

IDLE_S = 4.0
"""Maximum idle time of a connection: less than the five seconds after which uvicorn closes it."""

MAX_IDLE = 256


class Sink(Protocol):
    """Receiver of an answer. After ``on_end`` or ``on_broken`` no method is called any more."""

    def on_head(self, head: ResponseHead, data: bytes) -> None:
        """Take the head, with first bytes of the body, if any; a stream of events has some."""
        ...

    def on_body(self, data: bytes) -> None: ...

    def on_end(self) -> None: ...

    def on_broken(self, why: str, was_reused: bool, is_ours: bool = False) -> None:
        """Learn that the connection broke, or that its bytes are not a valid answer.

        Args:
            was_reused: True if the connection had carried another answer before, and no byte of
                this one: likely the server had just closed it, which says nothing of its health.
            is_ours: True if no connection could be made because this process lacks a resource.
        """
        ...


class ReplicaConnection(asyncio.Protocol):
    """Connection to a replica."""

    __slots__ = (
        "_body",
        "_early",
        "_head",
        "_is_paused",
        "_pool",
        "_sink",
        "_to_head",
        "_transport",
        "idle_since_s",
        "is_closed",
        "is_kept",
        "num_answers",
    )

    def __init__(self, pool: ConnectionPool) -> None:
        self._pool = pool
        self._sink: Sink | None = None
        self._body: Body | None = None
        self._early: ResponseHead | None = None
        self._head = b""
        self._to_head = self._is_paused = False
        self.num_answers = 0
        self.is_closed = False
        self.is_kept = True
        self.idle_since_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        if (connection := self._transport.get_extra_info("socket")) is not None:
            watch_server(connection)
        self._pool.opened(self)

    def send(self, parts: Sequence[bytes], sink: Sink, to_head: bool) -> None:
        """Send a whole request, whose answer goes to ``sink``."""
        self._sink, self._to_head = sink, to_head
        if len(parts) == 1:
            self._transport.write(parts[0])
        else:
            self._transport.writelines(parts)

    def data_received(self, data: bytes) -> None:
        sink, body = self._sink, self._body
        if sink is None:
            # Unrequested bytes must not become the answer to the next request.
            self.abort()
            return
        try:
            if body is None:
                self._read_head(sink, data)
                return
            used = body.feed(data)
        except ProtocolError as error:
            self._break(str(error))
            return
        if used == len(data) and not body.is_done:
            sink.on_body(data)
            return
        sink.on_body(data if used == len(data) else data[:used])
        self._end(sink, is_clean=used == len(data))

    def _read_head(self, sink: Sink, data: bytes) -> None:
        head, rest = self._early, data
        if head is None:
            if (found := self._parse_head(data)) is None:
                return
            head, rest = found
            if not rest and head.is_events:
                # vLLM sends this head at once, and the first event with the first token: until
                # then the answer has not begun, and another replica can still be tried.
                self._early = head
                return
        self._early = None
        used = head.body.feed(rest) if rest and not head.body.is_done else 0
        self._body = head.body
        self.is_kept = head.keep_alive
        is_clean = used == len(rest)
        sink.on_head(head, rest if is_clean else rest[:used])
        # The sink may have dropped the connection.
        if head.body.is_done and self._sink is sink:
            self._end(sink, is_clean)

    def _parse_head(self, data: bytes) -> tuple[ResponseHead, bytes] | None:
        """Return the head and the bytes after it; None if the head is not complete."""
        rest = self._head + data if self._head else data
        at = 0
        while True:
            end = rest.find(b"\r\n\r\n", at, at + MAX_HEAD_BYTES)
            if end < 0:
                self._head = rest[at:]
                if len(self._head) >= MAX_HEAD_BYTES:
                    raise ProtocolError(f"the head of the answer exceeds {MAX_HEAD_BYTES} bytes")
                return None
            head = parse_response_head(rest[at : end + 4], self._to_head)
            at = end + 4
            if head.status == 101:
                raise ProtocolError("the answer changes the protocol")
            if head.status >= 200:
                self._head = b""
                if 300 <= head.status < 400:
                    # A client may not reach the replica, and must not pass the balancer by.
                    head.lines = without_origin(head.lines, self._pool.origin)
                return head, rest[at:]

    def _end(self, sink: Sink, is_clean: bool) -> None:
        if self._sink is not sink:
            return
        self._sink = self._body = None
        self.num_answers += 1
        self.resume()
        # Give it back before the sink asks for a connection for its next request; but a replica
        # that has answered early may never read the rest of the body, nor what follows.
        if is_clean and not self._transport.get_write_buffer_size():
            self._pool.give_back(self)
        else:
            self.abort()
        sink.on_end()

    def _break(self, why: str) -> None:
        sink = self._sink
        self.abort()
        if sink is not None:
            sink.on_broken(why, was_reused=False)

    def eof_received(self) -> None:
        return None

    def connection_lost(self, exc: Exception | None) -> None:
        sink, self._sink = self._sink, None
        was_open, self.is_closed = not self.is_closed, True
        if was_open:
            self._pool.lost(self)
        if sink is None:
            return
        if isinstance(self._body, UntilClose) and exc is None:
            sink.on_end()
            return
        has_begun = self._body is not None or self._early is not None or bool(self._head)
        was_reused = self.num_answers > 0 and not has_begun
        sink.on_broken("the connection broke", was_reused)

    @property
    def is_open(self) -> bool:
        """Return whether bytes can be sent; the connection's end may not have been reported yet."""
        return not self._transport.is_closing()

    def abort(self) -> None:
        """Close at once, without a call of the sink. For the server, the request is cancelled."""
        self._sink = None
        if not self.is_closed:
            self.is_closed = True
            self._pool.lost(self)
            self._transport.abort()

    def pause(self) -> None:
        """Stop reading: the client is slower than the replica."""
        if not self.is_closed and not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def resume(self) -> None:
        if self._is_paused and not self.is_closed:
            self._is_paused = False
            self._transport.resume_reading()


class ConnectionPool:
    """Pool of connections to one server."""

    def __init__(
        self, endpoint: Endpoint, connect_timeout_s: float, tls: Certificates | None = None
    ) -> None:
        """``tls`` holds the trusted authorities; needed if the endpoint has TLS."""
        assert tls is not None or not endpoint.is_tls
        self.endpoint = endpoint
        self.origin = f"{endpoint.url.partition(':')[0]}://{endpoint.host_field}".encode()
        self.connect_timeout_s = connect_timeout_s
        self._tls = tls if endpoint.is_tls else None
        self._idle: list[ReplicaConnection] = []
        self._all: set[ReplicaConnection] = set()
        self._is_retired = False

    @property
    def is_open(self) -> bool:
        """Return whether a connection is open."""
        return bool(self._all)

    def take(self) -> ReplicaConnection | None:
        """Return the idle connection that was used last, or None."""
        while self._idle:
            connection = self._idle.pop()
            if connection.is_open:
                return connection
        return None

    async def connect(self) -> ReplicaConnection:
        """Return a new connection.

        Raises:
            OSError: The server refuses, is unreachable, or does not answer within the time limit.
        """
        loop = asyncio.get_running_loop()
        async with asyncio.timeout(self.connect_timeout_s):
            _, made = await loop.create_connection(
                lambda: ReplicaConnection(self),
                self.endpoint.host,
                self.endpoint.port,
                ssl=None if self._tls is None else self._tls.context,
            )
        return made

    def opened(self, connection: ReplicaConnection) -> None:
        """Remember an open connection."""
        self._all.add(connection)

    def give_back(self, connection: ReplicaConnection) -> None:
        """Take back a connection whose answer is complete."""
        if not connection.is_kept or self._is_retired or len(self._idle) >= MAX_IDLE:
            connection.abort()
            return
        connection.idle_since_s = monotonic()
        self._idle.append(connection)

    def lost(self, connection: ReplicaConnection) -> None:
        """Forget a closed connection."""
        self._all.discard(connection)
        if connection in self._idle:
            self._idle.remove(connection)

    def drop_idle(self) -> None:
        """Close the idle connections."""
        for connection in list(self._idle):
            connection.abort()

    def retire(self) -> None:
        """Close each connection as soon as no answer is under way on it."""
        self._is_retired = True
        self.drop_idle()

    def sweep(self, now_s: float) -> None:
        """Close connections idle for more than ``IDLE_S``: the server may be closing them."""
        while self._idle and now_s - self._idle[0].idle_since_s > IDLE_S:
            self._idle[0].abort()

    def close(self) -> None:
        """Close all connections, including those with a request under way."""
        for connection in list(self._all):
            connection.abort()
