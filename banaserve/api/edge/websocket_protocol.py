"""WebSockets of the front door: uvicorn's protocol, counted, and closed where nothing is read."""

from __future__ import annotations

from asyncio import AbstractEventLoop, Transport
from collections.abc import Hashable
from typing import Any

from uvicorn import Config
from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol
from uvicorn.server import ServerState

from banaserve.api.edge.authenticated import offer_mark
from banaserve.api.edge.edge import Edge
from banaserve.api.edge.refusals import note
from banaserve.net.stalled_writes import StalledWrites


class WebSocketProtocol(WebSocketsSansIOProtocol):
    """One connection that has been upgraded; its place in the table was that of its HTTP."""

    def __init__(
        self,
        edge: Edge,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: AbstractEventLoop | None = None,
    ) -> None:
        super().__init__(config, server_state, app_state, _loop)
        self._edge = edge
        self._peer: Hashable = None
        self._stalled = StalledWrites()

    def connection_made(self, transport: Transport) -> None:
        super().connection_made(transport)
        self._peer = transport.get_extra_info("peername") or id(self)
        if not self._edge.opened(self, self._peer):
            transport.abort()

    def connection_lost(self, exc: Exception | None) -> None:
        self._edge.table.remove(self, self._peer)
        super().connection_lost(exc)

    async def run_asgi(self) -> None:
        """Run the application, which may say that the client has shown a key."""
        offer_mark(self.scope, lambda: self._edge.table.authenticated(self, self._peer))
        await super().run_asgi()

    def sweep(self, now_s: float) -> None:
        """Close the connection where its client reads nothing: it cannot answer pings either."""
        unread = self.transport.get_write_buffer_size()
        limit_s = self._edge.limits.unread_s
        if self._stalled.stalled_s(unread, now_s) > limit_s:
            note("unread", 0, f"a client has read nothing for {limit_s:g} s")
            self.transport.abort()

    def evict(self) -> None:
        """Make way for another connection."""
        self.transport.abort()
