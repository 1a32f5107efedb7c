"""Place of a connection at the edge: its entry in the table, and the mark of a valid key."""

from __future__ import annotations

from asyncio import Transport
from collections.abc import Callable, Hashable

from starlette.types import Scope

from banaserve.base.net.stalled_writes import StalledWrites, num_unread_bytes
from banaserve.frontdoor.edge.edge import Edge, EdgeConnection
from banaserve.frontdoor.edge.refusals import note

_MARK = "banaserve.authenticated"


def offer_mark(scope: Scope, mark: Callable[[], None]) -> None:
    """Store ``mark`` in ``scope``, for the middleware that checks the request's key to call."""
    scope[_MARK] = mark


def mark_authenticated(scope: Scope) -> None:
    """Call the mark in ``scope``: the request has shown a valid key, or needs none."""
    mark = scope.get(_MARK)
    if mark is not None:
        mark()


class EdgePlace:
    """The part of a connection that all protocols of the front door share.

    Args:
        connection: Connection that the table sweeps and evicts.
    """

    def __init__(self, edge: Edge, connection: EdgeConnection) -> None:
        self._edge = edge
        self._connection = connection
        self._peer: Hashable = None
        self._stalled = StalledWrites()

    def take(self, transport: Transport) -> bool:
        """Return whether the connection may stay.

        An upgraded connection takes the place of its HTTP connection.
        """
        self._peer = transport.get_extra_info("peername") or id(self._connection)
        return self._edge.opened(self._connection, self._peer)

    def leave(self) -> None:
        """Give the place back, unless another protocol has taken it over."""
        self._edge.table.remove(self._connection, self._peer)

    def mark_authenticated(self) -> None:
        """Record that the client has shown a key: the connection is no longer evicted."""
        self._edge.table.authenticated(self._connection, self._peer)

    def drop_if_unread(self, transport: Transport, now_s: float) -> bool:
        """Abort if the client has read nothing for too long; return whether it was aborted."""
        limit_s = self._edge.limits.unread_s
        if self._stalled.stalled_s(num_unread_bytes(transport), now_s) <= limit_s:
            return False
        note("unread", 0, f"a client has read nothing for {limit_s:g} s")
        transport.abort()
        return True
