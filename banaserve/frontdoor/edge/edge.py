"""Edge of the front door: the table of connections that its protocols share, and their limits."""

from __future__ import annotations

import logging
from collections.abc import Hashable
from http import HTTPStatus
from typing import Protocol

from banaserve.base.net.connections import ConnectionTable
from banaserve.frontdoor.edge.limits import EdgeLimits
from banaserve.frontdoor.edge.refusals import closing_answer, note

logger = logging.getLogger(__name__)
_TOO_MANY = "too many connections are open; try again shortly"
TOO_MANY_ANSWER = closing_answer(HTTPStatus.SERVICE_UNAVAILABLE, _TOO_MANY)


class EdgeConnection(Protocol):
    """A connection of the front door, of any protocol."""

    def sweep(self, now_s: float) -> None:
        """Close the connection if its client has taken too long."""
        ...

    def evict(self) -> None: ...


class Edge:
    """All connections of one front door.

    Attributes:
        limits: Limits of connections.
    """

    def __init__(self, limits: EdgeLimits) -> None:
        self.limits = limits
        self.table: ConnectionTable[EdgeConnection] = ConnectionTable(
            limits.max_connections, limits.max_per_address
        )

    def opened(self, connection: EdgeConnection, peer: Hashable) -> bool:
        """Return whether ``connection`` may stay; another one may have been evicted for it."""
        evicted = self.table.add(connection, peer)
        if evicted is None:
            return True
        if evicted is connection:
            note("connections", HTTPStatus.SERVICE_UNAVAILABLE, _TOO_MANY)
            return False
        note("connections", 0, "a connection without a key has made way for a new one")
        evicted.evict()
        return True

    def sweep(self, now_s: float) -> None:
        """Close connections whose clients have taken too long; called about twice a second."""
        for connection in self.table:
            try:
                connection.sweep(now_s)
            except Exception:  # a failure of one connection must not stop the sweep of the others
                logger.exception("a connection could not be looked at")
