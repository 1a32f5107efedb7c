"""Limits of client connections at the front door, before a request is looked at."""

from __future__ import annotations

from dataclasses import dataclass

from banaserve.config import ServeConfig
from banaserve.net.descriptors import connections_within

_RESERVED_DESCRIPTORS = 512
"""File descriptors for engines, store and logs."""


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """What one client, and all of them, may take of the front door.

    Attributes:
        max_connections: Open at once; beyond, the oldest without a key makes way.
        max_per_address: Of these, from one address without a key; 0: a quarter.
        head_s: From the first byte of a head, or from the connection, to the head's end.
        body_s: From the head to the body's last byte; longer by a second for each
            ``body_bytes_per_s`` bytes that have come.
        unread_s: A client that reads nothing of what waits for it is dropped after so long.
        handshake_s: Longest TLS handshake.
        max_head_bytes: Of a head, and of what surrounds a chunked body.
        max_fields: Of a head.
        max_unwanted_bytes: Of a body whose request has been answered before its end.
    """

    max_connections: int = 16384
    max_per_address: int = 0
    head_s: float = 10.0
    body_s: float = 30.0
    body_bytes_per_s: float = 64 * 1024
    unread_s: float = 120.0
    handshake_s: float = 10.0
    max_head_bytes: int = 64 * 1024
    max_fields: int = 256
    max_unwanted_bytes: int = 32 * 2**20


def edge_limits(config: ServeConfig, num_descriptors: int) -> tuple[EdgeLimits, str]:
    """Limits of a server of ``config`` that may have so many file descriptors.

    Returns:
        The limits; and one line for the user where they allow fewer connections than is asked for,
        empty elsewhere.
    """
    wanted = config.max_connections or EdgeLimits().max_connections
    allowed = connections_within(num_descriptors, wanted, _RESERVED_DESCRIPTORS)
    limits = EdgeLimits(
        max_connections=allowed,
        max_per_address=config.max_connections_per_address,
        body_s=config.body_timeout_s,
    )
    if allowed == wanted:
        return limits, ""
    return limits, (
        f"{allowed} connections of clients at most: {num_descriptors} file descriptors (ulimit -n) "
        "allow no more"
    )
