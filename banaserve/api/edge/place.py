"""Place of one connection at the edge: in the table, and by what its client leaves unread."""

from __future__ import annotations

from asyncio import Transport
from collections.abc import Hashable

from banaserve.api.edge.edge import Edge, EdgeConnection
from banaserve.api.edge.refusals import note
from banaserve.net.stalled_writes import StalledWrites, num_unread_bytes


class EdgePlace:
    """The part of a connection that all protocols of the front door share.

    Args:
        connection: Swept and evicted through the table.
    """

    def __init__(self, edge: Edge, connection: EdgeConnection) -> None:
        self._edge = edge
        self._connection = connection
        self._peer: Hashable = None
        self._stalled = StalledWrites()

    def take(self, transport: Transport) -> bool:
        """Returns whether the connection may stay.

        One that was upgraded takes the place that its HTTP had.
        """
        self._peer = transport.get_extra_info("peername") or id(self._connection)
        return self._edge.opened(self._connection, self._peer)

    def leave(self) -> None:
        """Give the place back, unless another protocol has taken it over."""
        self._edge.table.remove(self._connection, self._peer)

    def mark_authenticated(self) -> None:
        """The client has shown a key: the connection makes way for no other."""
        self._edge.table.authenticated(self._connection, self._peer)

    def drop_if_unread(self, transport: Transport, now_s: float) -> bool:
        """Abort where the client has read nothing for too long; returns whether it was so."""
        limit_s = self._edge.limits.unread_s
        if self._stalled.stalled_s(num_unread_bytes(transport), now_s) <= limit_s:
            return False
        note("unread", 0, f"a client has read nothing for {limit_s:g} s")
        transport.abort()
        return True
