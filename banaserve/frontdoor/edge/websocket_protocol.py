"""WebSockets of the front door: uvicorn's protocol, counted, and closed if nothing is read."""

from __future__ import annotations

from asyncio import Transport
from typing import Any

from uvicorn.protocols.websockets.websockets_sansio_impl import WebSocketsSansIOProtocol

from banaserve.frontdoor.edge.edge import Edge
from banaserve.frontdoor.edge.place import EdgePlace, offer_mark


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
