"""TCP keep-alive of accepted connections: a client that is gone without a word is noticed."""

from __future__ import annotations

import socket

IDLE_S, INTERVAL_S, NUM_PROBES = 60, 15, 4
"""A dead peer is noticed after two minutes."""


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
