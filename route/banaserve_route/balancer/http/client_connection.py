"""Client connections: parsing of bytes into requests, and limits on the time a client takes."""

from __future__ import annotations

import asyncio
import struct
from collections import deque
from collections.abc import Collection, Hashable
from socket import SO_LINGER, SOL_SOCKET
from time import monotonic
from typing import Protocol, cast

import httptools

from banaserve.base.net.stalled_writes import StalledWrites, num_unread_bytes
from banaserve.base.net.upgrades import BodyOfUpgrade
from banaserve_route.balancer.http import replies
from banaserve_route.balancer.http.exchange import Exchange, ReplicaExchange
from banaserve_route.balancer.http.replica_connection import ConnectionPool, Sink
from banaserve_route.balancer.http.request import MAX_HEAD_BYTES, ClientRequest, RequestRefusedError

MAX_PIPELINED = 16
HEAD_TIMEOUT_S = 10.0
BODY_BYTES_PER_S = 64 * 1024
"""Number of received bytes of a body that extend its time limit by one second."""

KEEP_ALIVE_S = 75.0
_LINGER_S, _FLUSH_S = 2.0, 0.05
UNREAD_S = 75.0
_CHUNK_LINES_BYTES = 64
_RESETS, _CLOSES = struct.pack("ii", 1, 0), struct.pack("ii", 0, 0)


class ActiveRequest(Protocol):
    """Request under way, as its connection sees it."""

    def cancel(self) -> None:
        """Cancel the request, since the client has gone."""
        ...

    def pause(self) -> None:
        """Pause the answer, since the client reads more slowly than it arrives."""
        ...

    def resume(self) -> None: ...


class Client(Protocol):
    """Connection of a client as the balancer sees it, in this process or in a relay.

    Attributes:
        can_go_on: True if another request may follow the one under way.
        is_flushed: True if no byte for the client is left in this process.
        peer: The client's address and port.
    """

    can_go_on: bool
    peer: Hashable

    @property
    def is_flushed(self) -> bool: ...

    def write(self, data: bytes) -> None: ...

    def end_with_body(self) -> None:
        """Let the end of the connection be that of the body that begins."""
        ...

    def done(self, message: ClientRequest) -> None:
        """Finish ``message``, whose answer is complete."""
        ...

    def abort(self) -> None:
        """Break the connection, so that half an answer is not mistaken for a complete one."""
        ...

    def exchange(
        self, pool: ConnectionPool, message: ClientRequest, fields: bytes, sink: Sink
    ) -> Exchange:
        """Send ``message`` with ``fields`` to the server of ``pool``; ``sink`` gets the answer."""
        ...

    def sweep(self, now_s: float) -> None:
        """Close the connection if its client has taken too long to send or to read."""
        ...

    def evict(self) -> None:
        """Make way for another connection."""
        ...

    def leave_if_idle(self) -> None:
        """Close the connection if no request is under way, or else after the answer."""
        ...


def write_error(
    client: Client, message: ClientRequest, status: int, why: str, retry_after_s: float | None
) -> None:
    """Write an error as the whole answer to ``message``."""
    if message.method == b"HEAD":
        # The answer to HEAD must not have the body sent here, so the connection must end.
        client.can_go_on = False
    closes = not client.can_go_on
    client.write(replies.error(status, why, closes=closes, retry_after_s=retry_after_s))


async def until_flushed(clients: Collection[Client]) -> None:
    """Return when no byte for one of ``clients``, which may change meanwhile, is left here."""
    # Transports report no such event.
    while not all(client.is_flushed for client in clients):  # noqa: ASYNC110
        await asyncio.sleep(_FLUSH_S)


class RequestHandler(Protocol):
    """Server behind the connections of clients.

    The balancer implements this protocol, and each relay. The protocol is here because the modules
    of both import this one: an import of theirs would close a circle.

    Attributes:
        max_body_bytes: Maximum size of the body of a request, in bytes.
        body_timeout_s: Maximum time for a body in seconds, extended according to
            ``BODY_BYTES_PER_S``.
    """

    max_body_bytes: int
    body_timeout_s: float

    def opened(self, client: ClientConnection) -> bool:
        """Return whether ``client`` may stay open; another one without a key may be evicted."""
        ...

    def closed(self, client: ClientConnection) -> None: ...

    def check_head(self, client: ClientConnection, message: ClientRequest) -> None:
        """Check that the body of ``message`` may be sent.

        Raises:
            RequestRefusedError: The body may not be sent.
        """
        ...

    def hold(self, num_bytes: int) -> None:
        """Count bytes of bodies in memory; a negative number releases bytes.

        Raises:
            RequestRefusedError: There is no room for the bytes.
        """
        ...

    def take(self, client: ClientConnection, message: ClientRequest) -> ActiveRequest | None:
        """Take a complete request; return None if it is answered already."""
        ...

    def refused(self, error: RequestRefusedError) -> None: ...

    def dropped(self, cause: str, why: str) -> None:
        """Record a connection closed without an answer; ``cause`` is one of a few fixed words."""
        ...


class ClientConnection(asyncio.Protocol):
    """Connection from a client, on which requests and answers follow one another in order.

    The attributes are those of ``Client``.
    """

    __slots__ = (
        "_active",
        "_closes_at_s",
        "_handler",
        "_head_bytes",
        "_held_bytes",
        "_in_head",
        "_is_body_timed",
        "_is_busy",
        "_is_choked",
        "_is_head_timed",
        "_is_paused",
        "_message",
        "_offers_http2",
        "_parser",
        "_refusal",
        "_stalled",
        "_transport",
        "_waiting",
        "can_go_on",
        "peer",
    )

    def __init__(self, handler: RequestHandler) -> None:
        self._handler = handler
        self._parser = httptools.HttpRequestParser(self)
        self._message = ClientRequest()
        self._waiting: deque[ClientRequest] = deque()
        self._active: ActiveRequest | None = None
        self._refusal: RequestRefusedError | None = None
        self._closes_at_s = 0.0
        self._head_bytes = self._held_bytes = 0
        self._stalled = StalledWrites()
        self.peer: Hashable = None
        self._in_head = True
        self._is_busy = self._is_choked = self._is_paused = self._is_body_timed = False
        self._is_head_timed = True
        self._offers_http2 = False
        self.can_go_on = True

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)
        self.peer = self._transport.get_extra_info("peername") or id(self)
        self._within(HEAD_TIMEOUT_S)
        if not self._handler.opened(self):
            self.turn_away()

    def connection_lost(self, exc: Exception | None) -> None:
        self.can_go_on = False
        self._waiting.clear()
        self._give_back(self._held_bytes)
        self._handler.closed(self)
        active, self._active = self._active, None
        if active is not None:
            active.cancel()

    def data_received(self, data: bytes) -> None:
        if self._refusal is not None:
            return
        self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserCallbackError as error:
            cause = error.__context__
            if not isinstance(cause, RequestRefusedError):
                raise
            self._refuse(cause)
            return
        except httptools.HttpParserUpgrade as upgrade:
            # The parser takes all bytes after the head for another protocol's.
            self._offers_http2 = False
            self._parser = httptools.HttpRequestParser(BodyOfUpgrade(self))
            head = b"POST / HTTP/1.1\r\nHost: b\r\n%b\r\n" % self._message.framing
            body = data[upgrade.args[0] :]
            self._head_bytes -= len(body)  # counted again
            self.data_received(head + body)
            return
        except httptools.HttpParserError as error:
            self._refuse(RequestRefusedError(400, f"not a valid HTTP/1.1 request: {error}"))
            return
        # The parser buffers a field of a head, or of trailers after a body, until it is complete.
        if self._head_bytes > MAX_HEAD_BYTES * (1 if self._in_head else 2):
            self._refuse(RequestRefusedError(431, f"the head exceeds {MAX_HEAD_BYTES} bytes"))
        elif not self._is_busy:
            self._watch_part()

    def _watch_part(self) -> None:
        """Set the time limit for the rest of a head or body of which a part has arrived."""
        if not self._in_head:
            if not self._is_body_timed:
                self._is_body_timed = True
                self._within(self._handler.body_timeout_s)
        elif self._head_bytes and not self._is_head_timed:
            self._is_head_timed = True
            self._within(HEAD_TIMEOUT_S)

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        # The connection ends with an answer to a request that came in the same read.
        if self._refusal is not None:
            raise self._refusal

    def on_url(self, part: bytes) -> None:
        self._message.add_url(part)

    def on_header(self, name: bytes, value: bytes) -> None:
        # Fields after the body are trailers, which must not change a request.
        if self._in_head:
            self._message.add_field(name, value)

    def on_headers_complete(self) -> None:
        message, parser = self._message, self._parser
        self._in_head = False
        keep_alive = parser.should_keep_alive()
        message.head_complete(parser.get_method(), parser.get_http_version(), keep_alive)
        # Java's client offers HTTP/2 with each first request of a connection.
        self._offers_http2 = parser.should_upgrade()
        message.keep_alive &= not self._offers_http2
        if message.announced_bytes > self._handler.max_body_bytes:
            limit = self._handler.max_body_bytes
            raise RequestRefusedError(
                413, f"the body is larger than {limit} bytes (--max-body-size)"
            )
        self._handler.check_head(self, message)
        if not self._is_busy:
            self._invite_body()

    def _invite_body(self) -> None:
        """Ask for the body for which the client waits to be asked."""
        if self._message.expects_continue and not (self._in_head or self._message.size):
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._message.add_body(data, self._handler.max_body_bytes)
        self._handler.hold(len(data))
        self._held_bytes += len(data)
        self._head_bytes = max(0, self._head_bytes - len(data) - _CHUNK_LINES_BYTES)

    def on_message_complete(self) -> None:
        if self._offers_http2:
            return  # the body follows
        message, self._message = self._message, ClientRequest()
        self._in_head, self._head_bytes, self._is_body_timed = True, 0, False
        if not self._is_busy and not self._waiting and not self._is_choked:
            self._begin(message)
            return
        if len(self._waiting) >= MAX_PIPELINED:
            raise RequestRefusedError(
                429, f"more than {MAX_PIPELINED} requests wait on one connection"
            )
        self._waiting.append(message)
        if not self._is_paused:
            self._is_paused = True
            self._transport.pause_reading()

    def _begin(self, message: ClientRequest) -> None:
        self._is_busy, self._closes_at_s, self._is_head_timed = True, 0.0, False
        self.can_go_on = message.keep_alive
        active = self._handler.take(self, message)
        # An immediate answer has ended the request already.
        if self._is_busy:
            self._active = active

    # For the request under way.

    @property
    def is_flushed(self) -> bool:
        return not num_unread_bytes(self._transport)

    def write(self, data: bytes) -> None:
        # The end of the connection may not have been reported yet.
        if not self._transport.is_closing():
            self._transport.write(data)

    def end_with_body(self) -> None:
        """Let the end of the connection be that of the body that begins."""
        self.can_go_on = False
        # Otherwise the death of this process would end the body as if it were complete.
        self._set_linger(_RESETS)

    def done(self, message: ClientRequest) -> None:
        """Finish ``message``, whose answer is complete."""
        self._active, self._is_busy = None, False
        self._give_back(message.size)
        if not self.can_go_on:
            self._set_linger(_CLOSES)
            self._leave()
            return
        self._within(KEEP_ALIVE_S)
        if self._waiting:
            asyncio.get_running_loop().call_soon(self._begin_next)
        elif self._refusal is not None:
            self._answer_refusal(self._refusal)
        else:
            if self._is_paused:
                self._is_paused = False
                self._transport.resume_reading()
            self._watch_part()
            self._invite_body()

    def _begin_next(self) -> None:
        # If answers were added to unread answers, the write buffer would grow without bound.
        if self._waiting and not self._is_busy and not self._is_choked:
            self._begin(self._waiting.popleft())

    def exchange(
        self, pool: ConnectionPool, message: ClientRequest, fields: bytes, sink: Sink
    ) -> Exchange:
        return ReplicaExchange(pool, message, fields, sink)

    # Time limits, back-pressure, closing.

    def sweep(self, now_s: float) -> None:
        """Close the connection if its client has taken too long to send or to read."""
        unread = num_unread_bytes(self._transport)
        if self._stalled.stalled_s(unread, now_s) >= UNREAD_S:
            self._handler.dropped("unread", f"a client has read nothing for {UNREAD_S:g} s")
            self.reset()
            return
        grace_s = 0.0 if self._in_head else self._message.size / BODY_BYTES_PER_S
        # Not while answers are unread: a slow but reading client would lose the end of its answer.
        if not self._closes_at_s or now_s < self._closes_at_s + grace_s or unread:
            return
        if self._refusal is not None:
            self._transport.abort()
        elif self._in_head and not self._head_bytes:
            self._transport.close()
        else:
            self._refuse(RequestRefusedError(408, "the request took too long to arrive"))

    def evict(self) -> None:
        """Make way for another connection; the client still gets the end of a complete answer."""
        if self._active is None and not self._transport.get_write_buffer_size():
            self._transport.abort()
        else:
            self.reset()

    abort = evict

    def reset(self) -> None:
        """End the connection so that the client takes no part of a body for the whole of it."""
        self._set_linger(_RESETS)
        self._transport.abort()

    def _set_linger(self, how: bytes) -> None:
        """Set whether the end of the connection resets it.

        A body that ends with its connection would seem complete after a usual end.
        """
        if not self._transport.is_closing():
            connection = self._transport.get_extra_info("socket")
            connection.setsockopt(SOL_SOCKET, SO_LINGER, how)

    def leave_if_idle(self) -> None:
        """Close the connection if no request is under way, or else after the answer."""
        self.can_go_on = False
        if not self._is_busy:
            self._transport.close()

    def pause_writing(self) -> None:
        self._is_choked = True
        if self._active is not None:
            self._active.pause()

    def resume_writing(self) -> None:
        self._is_choked = False
        if self._active is not None:
            self._active.resume()
        elif self._waiting:
            asyncio.get_running_loop().call_soon(self._begin_next)

    def eof_received(self) -> None:
        return None

    def _refuse(self, error: RequestRefusedError) -> None:
        if self._refusal is not None:
            return
        self._refusal = error
        self._handler.refused(error)
        if not self._is_busy and not self._waiting:
            self._answer_refusal(error)

    def turn_away(self) -> None:
        """Refuse the connection and close it at once: lingering would hold a file descriptor."""
        error = RequestRefusedError(503, "too many connections are open; try again shortly")
        if self._refusal is None:  # nothing may be written after the answer to a bad request
            self._refusal = error
            self._handler.refused(error)
            again_s = error.retry_after_s
            self.write(replies.error(503, str(error), closes=True, retry_after_s=again_s))
        self._transport.close()

    def _answer_refusal(self, error: RequestRefusedError) -> None:
        retry_after_s = error.retry_after_s
        self.write(
            replies.error(error.status, str(error), closes=True, retry_after_s=retry_after_s)
        )
        self._leave()

    def _leave(self) -> None:
        """Close for writing and discard further bytes: closing at once may lose the answer."""
        self._refusal = self._refusal or RequestRefusedError(400, "the connection is closing")
        self._waiting.clear()
        self._within(_LINGER_S)
        if self._transport.can_write_eof() and not self._transport.is_closing():
            self._transport.write_eof()
        else:
            self._transport.close()

    def _within(self, seconds: float) -> None:
        self._closes_at_s = monotonic() + seconds

    def _give_back(self, num_bytes: int) -> None:
        self._held_bytes -= num_bytes
        self._handler.hold(-num_bytes)
