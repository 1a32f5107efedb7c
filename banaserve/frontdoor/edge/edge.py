"""Edge of the front door: the table of connections that its protocols share, and a place in it."""

from __future__ import annotations

import logging
from asyncio import Transport
from collections.abc import Callable, Hashable
from http import HTTPStatus
from typing import Protocol

from starlette.types import ASGIApp, Receive, Scope, Send

from banaserve.base.net.connections import ConnectionTable
from banaserve.base.net.stalled_writes import StalledWrites, num_unread_bytes
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


class RootPath:
    """Middleware that states the root path of requests (``--root-path``).

    vLLM's application states it too, but only after ours has looked at the path.
    """

    def __init__(self, app: ASGIApp, root_path: str | None) -> None:
        self._app, self._root_path = app, root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        scope["root_path"] = self._root_path or ""
        await self._app(scope, receive, send)


def path_of(scope: Scope) -> str:
    """Return the path of a request below its root path; empty if it is no request.

    As for the router of vLLM's application, ``/api`` is no root path of ``/apis``.
    """
    path: str = scope.get("path", "")
    below = path.removeprefix(scope.get("root_path", ""))
    return below if not below or below.startswith("/") else path


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
