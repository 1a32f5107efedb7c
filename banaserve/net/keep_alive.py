"""TCP keep-alive: a peer whose host or network is gone is noticed without a word from it.

The kernel of a host that lives answers probes, also for a process that is busy or stopped.
"""

from __future__ import annotations

import socket
from asyncio.trsock import TransportSocket

IDLE_S, INTERVAL_S, NUM_PROBES = 60, 15, 4
"""A client that is gone is noticed after two minutes."""
SERVER_IDLE_S, SERVER_INTERVAL_S, SERVER_PROBES = 10, 5, 3
"""A server that is gone is noticed after 25 s: its requests can be sent to another one."""


def keep_alive(listening: socket.socket) -> None:
    """Let every connection that ``listening`` accepts from here on send keep-alive probes.

    Linux copies the options of a listening socket to those that it accepts.
    """
    if listening.family not in (socket.AF_INET, socket.AF_INET6):
        return
    listening.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, IDLE_S)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, INTERVAL_S)
    listening.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, NUM_PROBES)


def watch_server(connection: socket.socket | TransportSocket) -> None:
    """Let a connection that was opened to a server break if the server's host is gone.

    It breaks too if what was sent is not acknowledged for as long.
    """
    if connection.family not in (socket.AF_INET, socket.AF_INET6):
        return
    patience_s = SERVER_IDLE_S + SERVER_INTERVAL_S * SERVER_PROBES
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, SERVER_IDLE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, SERVER_INTERVAL_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, SERVER_PROBES)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, patience_s * 1000)
