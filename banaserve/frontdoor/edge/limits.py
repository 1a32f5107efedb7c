"""Limits of client connections at the front door, before a request is processed."""

from __future__ import annotations

from dataclasses import dataclass

from banaserve.base.config.serve_config import ServeConfig
from banaserve.base.net.sockets import connections_within

_RESERVED_DESCRIPTORS = 512
"""File descriptors reserved for engines, store and logs."""


@dataclass(frozen=True, slots=True)
class EdgeLimits:
    """Limits of the front door for each client connection, and for all of them.

    Attributes:
        max_connections: Maximum number of open connections; beyond it, the oldest connection
            without a key is closed.
        max_per_address: Maximum number of connections without a key from one address; 0: a quarter
            of ``max_connections``.
        head_s: Maximum time from a head's first byte, or from the connection's beginning, to the
            head's end, in seconds.
        body_s: Maximum time from the head to the body's last byte, in seconds; extended by a
            second for each ``body_bytes_per_s`` bytes received.
        unread_s: Time after which a client that reads none of the data sent to it is dropped, in
            seconds.
        handshake_s: Maximum time of a TLS handshake, in seconds.
        max_head_bytes: Maximum size of a head; head and framing of a chunked body together may
            have twice as many bytes.
        max_fields: Maximum number of fields of a head and its trailers.
        max_unwanted_bytes: Maximum size of the rest of a body whose request has been answered
            before the body's end.
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
    """Return the limits for a server of ``config`` with ``num_descriptors`` file descriptors.

    Returns:
        The limits; and one line for the user if they allow fewer connections than configured, else
        an empty string.
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
