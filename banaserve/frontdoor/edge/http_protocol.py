"""HTTP of the front door: uvicorn's protocol with limits of bytes, fields and time."""

from __future__ import annotations

from asyncio import Transport
from contextvars import copy_context
from http import HTTPStatus
from time import monotonic
from typing import Any

import httptools
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from banaserve.base.net.upgrades import BodyOfUpgrade
from banaserve.frontdoor.edge.edge import TOO_MANY_ANSWER, Edge, EdgePlace, offer_mark
from banaserve.frontdoor.edge.refusals import closing_answer, note

_CHUNK_LINES_BYTES = 64
_LINGER_S = 2.0


class HttpProtocol(HttpToolsProtocol):
    """An HTTP connection of the front door.

    uvicorn's own limits are for another parser (``h11_max_incomplete_event_size``), or do not
    distinguish clients with a key from those without one (``limit_concurrency``).
    """

    def __init__(self, edge: Edge, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._place = EdgePlace(edge, self)
        self._limits = edge.limits
        self._max_head_bytes = edge.limits.max_head_bytes
        self._max_fields = edge.limits.max_fields
        self._in_head = True
        self._is_refused = self._is_authenticated = self._is_last = False
        # Counts of the head under way, and of the framing around a body.
        self._framing_bytes = self._num_fields = self._body_bytes = self._unwanted_bytes = 0
        # Deadline and last sweep; a deadline of 0: no part of a request is awaited.
        self._due_s = self._swept_s = 0.0
        self._refusal: tuple[str, HTTPStatus, str] | None = None

    def connection_made(self, transport: Transport) -> None:
        super().connection_made(transport)
        self._context = copy_context()
        self._due_s = monotonic() + self._limits.head_s
        if not self._place.take(transport):
            self._is_refused = True
            transport.write(TOO_MANY_ANSWER)
            transport.close()

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.leave()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._is_refused:
            return
        self._unset_keepalive_if_required()
        self._framing_bytes += len(data)
        try:
            self.parser.feed_data(data)
        except httptools.HttpParserUpgrade as upgrade:
            self._upgrade(data[upgrade.args[0] :])
            return
        except httptools.HttpParserError:
            if not self._is_refused:
                self._refuse(*(self._refusal or _NO_REQUEST))
            return
        # The parser buffers a field of a head or trailer until the field is complete.
        limit = self._max_head_bytes
        if self._framing_bytes > (limit if self._in_head else 2 * limit):
            self._refuse(*self._too_long())
        elif not self._due_s and self._framing_bytes and self._is_quiet:
            self._due_s = monotonic() + self._limits.head_s

    def _upgrade(self, data: bytes) -> None:
        """Become a WebSocket; any other upgrade is ignored, with one answer (RFC 9110, 7.8).

        Args:
            data: Bytes after the head, which the parser takes for another protocol's.
        """
        if not self._should_upgrade():
            self.cycle.keep_alive = False
            self._is_last = True
            self.parser = httptools.HttpRequestParser(BodyOfUpgrade(self))
            self._framing_bytes -= len(data)  # counted again
            framing = (b"%b: %b\r\n" % field for field in self.headers if field[0] in _FRAMING)
            self.data_received(b"POST / HTTP/1.1\r\n%b\r\n%b" % (b"".join(framing), data))
        elif self._is_quiet:
            self.handle_websocket_upgrade()
        else:
            self._refuse(*_NO_REQUEST)

    @property
    def _is_quiet(self) -> bool:
        """Return whether no answer is under way."""
        return self.cycle is None or self.cycle.response_complete

    # The parser's callbacks.

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._num_fields = 0
        if not self._is_authenticated:
            offer_mark(self.scope, self._mark_authenticated)

    def on_url(self, url: bytes) -> None:
        super().on_url(url)
        if len(self.url) > self._max_head_bytes:
            self._stop(self._too_long())

    def on_header(self, name: bytes, value: bytes) -> None:
        self._num_fields += 1
        if self._num_fields > self._max_fields:
            self._stop(self._too_long())
        # Fields that follow a body are trailers: they must not change a request.
        if self._in_head:
            HttpToolsProtocol.on_header(self, name, value)

    def on_headers_complete(self) -> None:
        super().on_headers_complete()
        self._in_head = False
        self._body_bytes = self._unwanted_bytes = 0
        self._due_s = monotonic() + self._limits.body_s

    def on_body(self, body: bytes) -> None:
        num_bytes = len(body)
        self._body_bytes += num_bytes
        self._framing_bytes = max(0, self._framing_bytes - num_bytes - _CHUNK_LINES_BYTES)
        if self.cycle.response_complete:
            self._count_unwanted(num_bytes)
        super().on_body(body)

    def _count_unwanted(self, num_bytes: int) -> None:
        """Count bytes of a body after its answer: a client may send the rest, up to a limit."""
        self._unwanted_bytes += num_bytes
        limit = self._limits.max_unwanted_bytes
        if self._unwanted_bytes > limit and not self._is_refused:
            note("unwanted", 0, f"more than {limit} bytes of a body have come behind its answer")
            self._is_refused = True
            self.transport.abort()

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade() and not self._should_upgrade():
            return  # the body follows
        self._in_head = True
        self._framing_bytes = 0
        self._due_s = 0.0
        super().on_message_complete()
        self._is_refused |= self._is_last  # further bytes are ignored

    def on_response_complete(self) -> None:
        # The next request of a pipeline begins here, and must not get this one's tenant and limits.
        self._context.run(super().on_response_complete)
        if self._in_head and self._framing_bytes and not self._due_s:
            self._due_s = monotonic() + self._limits.head_s

    def _mark_authenticated(self) -> None:
        self._is_authenticated = True
        self._place.mark_authenticated()

    # Timeouts and closing.

    def sweep(self, now_s: float) -> None:
        """Close the connection if its client has taken too long to send or to read."""
        since_s, self._swept_s = max(0.0, now_s - (self._swept_s or now_s)), now_s
        if self._place.drop_if_unread(self.transport, now_s) or not self._due_s:
            return
        if self.flow.read_paused and not self._is_refused:
            # Time in which this side does not read is not the client's.
            self._due_s += since_s
        else:
            grace_s = self._body_bytes / self._limits.body_bytes_per_s
            if now_s >= self._due_s + (0 if self._in_head else grace_s):
                self._expire()

    def _expire(self) -> None:
        if self._is_refused:
            self.transport.abort()
        elif self._in_head and not self._framing_bytes:
            note("silent", 0, "a client has sent nothing on a new connection")
            self.transport.close()
            self._is_refused = True
        elif self._in_head:
            self._refuse("head_time", HTTPStatus.REQUEST_TIMEOUT, "the head took too long")
        else:
            self._refuse("body_time", HTTPStatus.REQUEST_TIMEOUT, "the body took too long")

    def evict(self) -> None:
        """Make way for another connection."""
        self._is_refused = True
        self.transport.abort()

    def _too_long(self) -> tuple[str, HTTPStatus, str]:
        limits = self._limits
        return (
            "head_size",
            HTTPStatus.REQUEST_HEADER_FIELDS_TOO_LARGE,
            f"the head has more than {limits.max_head_bytes} bytes or {limits.max_fields} fields",
        )

    def _stop(self, refusal: tuple[str, HTTPStatus, str]) -> None:
        """Abort the parser from within one of its callbacks."""
        self._refusal = refusal
        raise ValueError(refusal[2])

    def _refuse(self, cause: str, status: HTTPStatus, message: str) -> None:
        """Refuse invalid data: close, with an answer only if the client can attribute it."""
        self._is_refused = True
        cycle = self.cycle
        is_of_cycle = not self._in_head
        if self._is_quiet:
            can_answer = not is_of_cycle
        else:
            can_answer = is_of_cycle and not self.pipeline and not cycle.response_started
        note(cause, status if can_answer else 0, message)
        if not can_answer:
            self.transport.close()
            return
        if not self._is_quiet:
            cycle.disconnected = True
            cycle.message_event.set()
        self.transport.write(closing_answer(status, message))
        self._linger()

    def _linger(self) -> None:
        """Discard input for a while: if closed at once, the client might not receive the answer."""
        self._due_s = monotonic() + _LINGER_S
        self.flow.resume_reading()
        if self.transport.can_write_eof():
            self.transport.write_eof()
        else:
            self.transport.close()


_FRAMING = (b"content-length", b"transfer-encoding")
_NO_REQUEST = ("no_request", HTTPStatus.BAD_REQUEST, "this is no valid HTTP/1.1 request")
