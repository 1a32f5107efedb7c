"""Listener of a balancer or of a relay: client connections on a socket, with TLS or without."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from typing import Protocol

from banaserve.base.net.connections import ConnectionTable, Evictable
from banaserve.base.net.sockets import keep_alive
from banaserve.base.net.tls import Certificates, ClientListener, TlsListener
from banaserve_route.balancer.config import BalancerSettings
from banaserve_route.balancer.http.client_connection import ClientConnection, RequestHandler

_BACKLOG = 2048

_HANDSHAKE_S = 10.0


class ListeningHandler(RequestHandler, Protocol):
    """Handler of requests that accepts clients.

    Attributes:
        connections: Connections of clients, among them those in a TLS handshake.
        certificates: Certificates for serving clients; None for plain HTTP.
        log: Called with one line per event.
    """

    connections: ConnectionTable[Evictable]
    certificates: Certificates | None
    log: Callable[[str], None]
    settings: BalancerSettings


async def listen(handler: ListeningHandler, sock: socket.socket) -> ClientListener:
    """Accept clients on ``sock``, with TLS if the settings name a certificate.

    Raises:
        UserError: The certificate cannot be used.
    """
    keep_alive(sock)
    if (tls := handler.settings.server_tls) is None:
        loop = asyncio.get_running_loop()
        return await loop.create_server(
            lambda: ClientConnection(handler), sock=sock, backlog=_BACKLOG
        )
    handler.certificates = Certificates(tls, handler.log)
    return TlsListener(
        sock,
        lambda: ClientConnection(handler),
        handler.certificates,
        handler.connections,
        _HANDSHAKE_S,
        lambda cause: handler.dropped(cause, "a connection has ended before its TLS handshake"),
    )
