"""WebSockets of the front door: uvicorn's protocol, counted, and limits of realtime sessions."""

from __future__ import annotations

import asyncio
import contextlib
from asyncio import Transport
from dataclasses import dataclass
from typing import Any

from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from banaserve.frontdoor.edge.edge import Edge, EdgePlace, offer_mark
from banaserve.frontdoor.edge.refusals import note


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """A connection that has been upgraded to a WebSocket."""

    def __init__(self, edge: Edge, **of_uvicorn: Any) -> None:
        super().__init__(**of_uvicorn)
        self._place = EdgePlace(edge, self)

    def connection_made(self, transport: Transport) -> None:
        super().connection_made(transport)
        if not self._place.take(transport):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._place.leave()
        super().connection_lost(exc)

    async def run_asgi(self) -> None:
        """Run the application, which may mark that the client has shown a key."""
        offer_mark(self.scope, self._place.mark_authenticated)
        await super().run_asgi()

    def sweep(self, now_s: float) -> None:
        """Close the connection if its client reads nothing: such a client answers no pings."""
        self._place.drop_if_unread(self.transport, now_s)

    def evict(self) -> None:
        """Make way for another connection."""
        self.transport.abort()


_POLICY_VIOLATION, _TOO_BIG, _TRY_AGAIN_LATER = 1008, 1009, 1013


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of one realtime session.

    Attributes:
        session_s: Maximum time of a session, in seconds.
        silent_s: Maximum time without a message from either side, in seconds.
        max_bytes: Maximum size of all messages of the client together.
    """

    session_s: float = 3600.0
    silent_s: float = 300.0
    max_bytes: int = 256 * 2**20


class WebSocketLimit:
    """Middleware that ends sessions beyond ``limits``, with a close frame that gives the reason."""

    def __init__(self, app: ASGIApp, limits: SessionLimits | None = None) -> None:
        self._app = app
        self._limits = limits or SessionLimits()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "websocket":
            await self._app(scope, receive, send)
            return
        await _Session(self._limits, receive, send).run(self._app, scope)


class _Session:
    def __init__(self, limits: SessionLimits, receive: Receive, send: Send) -> None:
        self._limits = limits
        self._receive_next, self._send_next = receive, send
        self._loop = asyncio.get_running_loop()
        self._ends_s = self._loop.time() + limits.session_s
        self._num_bytes = 0
        self._timeout: asyncio.Timeout | None = None
        self._is_closed = False
        self._why = ("session_time", _TRY_AGAIN_LATER, "the session has had all its time")

    async def run(self, app: ASGIApp, scope: Scope) -> None:
        try:
            async with asyncio.timeout_at(self._due_s()) as self._timeout:
                await app(scope, self._receive, self._send)
        except TimeoutError:
            if not self._timeout or not self._timeout.expired():
                raise
            # Judged by the timer's time, not the clock: a loop's clock may be behind its timers.
            was_silent = (self._timeout.when() or 0.0) < self._ends_s
            if was_silent and self._why[0] == "session_time":
                self._why = ("session_silent", _POLICY_VIOLATION, "the session was silent")
            await self._close()

    def _due_s(self) -> float:
        return min(self._ends_s, self._loop.time() + self._limits.silent_s)

    def _heard(self) -> None:
        if self._timeout is not None and not self._timeout.expired():
            self._timeout.reschedule(self._due_s())

    async def _receive(self) -> Message:
        message = await self._receive_next()
        if message["type"] == "websocket.receive":
            text, data = message.get("text"), message.get("bytes")
            self._num_bytes += len(text or "") + len(data or b"")
            if self._num_bytes > self._limits.max_bytes:
                self._why = ("session_size", _TOO_BIG, "the session has sent too many bytes")
                await self._close()
                return {"type": "websocket.disconnect", "code": _TOO_BIG}
            self._heard()
        return message

    async def _send(self, message: Message) -> None:
        if self._is_closed:
            return
        self._is_closed = message["type"] == "websocket.close"
        await self._send_next(message)
        self._heard()

    async def _close(self) -> None:
        if self._is_closed:
            return
        self._is_closed = True
        cause, code, reason = self._why
        note(cause, 0, reason)
        # A client that reads nothing may also delay this until it is dropped.
        with contextlib.suppress(Exception):
            await self._send_next({"type": "websocket.close", "code": code, "reason": reason})
