"""TCP keep-alive: detects a peer whose host or network has failed without closing connections.

The kernel of a live host answers probes, also for a process that is busy or stopped.
"""

from __future__ import annotations

import socket
from asyncio.trsock import TransportSocket

IDLE_S, INTERVAL_S, NUM_PROBES = 60, 15, 4
"""Probe settings, times in seconds: a lost client is detected after two minutes."""
SERVER_IDLE_S, SERVER_INTERVAL_S, SERVER_PROBES = 10, 5, 3
"""Probe settings, times in seconds: a lost server is detected after 25 s, so that its requests can
be sent to another server."""


def keep_alive(listening: socket.socket) -> None:
    """Let every connection that ``listening`` accepts from now on send keep-alive probes.

    Linux copies the options of a listening socket to the accepted sockets.
    """
    if listening.family not in (socket.AF_INET, socket.AF_INET6):
        return
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)


def watch_server(connection: socket.socket | TransportSocket) -> None:
    """Let a connection to a server break if the server's host is lost.

    The connection also breaks if sent data is not acknowledged for the same time.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    patience_s = SERVER_IDLE_S + SERVER_INTERVAL_S * SERVER_PROBES
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SERVER_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SERVER_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SERVER_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_s * 1000)
