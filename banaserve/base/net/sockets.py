"""Sockets and other descriptors: their number, errors for lack of them, and keep-alive."""

from __future__ import annotations

import errno
import os
import resource
import socket
from asyncio.trsock import TransportSocket

_OWN_FAULTS = frozenset(
    (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL)
)
_FEWEST_CONNECTIONS = 16
_ENOUGH = 2**20
"""Maximum limit set: containers may allow 2**30, and child programs may iterate over them all."""


def raise_descriptor_limit() -> int:
    """Raise the soft limit of descriptors to the hard limit; return the limit in force.

    The soft limit of 1,024 is for programs that use ``select``.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _ENOUGH if hard == resource.RLIM_INFINITY else min(hard, _ENOUGH)
    if soft == resource.RLIM_INFINITY or wanted <= soft:
        return soft
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (OSError, ValueError):  # as in a sandbox
        return soft
    return wanted


def connections_within(limit: int, wanted: int, reserved: int, each: int = 1) -> int:
    """Return the number of client connections that ``limit`` descriptors allow.

    Args:
        wanted: Maximum number of connections to return.
        reserved: Number of descriptors for everything else; at most a quarter of ``limit``.
        each: Number of descriptors per connection: 2 if a request needs a second one.
    """
    if limit == resource.RLIM_INFINITY:
        return wanted
    left = limit - min(reserved, limit // 4)
    return min(wanted, max(_FEWEST_CONNECTIONS, left // each))


def is_own_fault(error: BaseException) -> bool:
    """Return whether a connection has failed for lack of a local resource, not due to the peer.

    The resolver reports a name as unknown when it cannot open its files.
    """
    if isinstance(error, socket.gaierror):
        return _are_used_up()
    return isinstance(error, OSError) and error.errno in _OWN_FAULTS


def _are_used_up() -> bool:
    try:
        os.close(os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC))
    except OSError as error:
        return error.errno in _OWN_FAULTS
    return False


IDLE_S, INTERVAL_S, NUM_PROBES = 60, 15, 4
"""Probe settings, times in seconds: a lost client is detected after two minutes."""
SERVER_IDLE_S, SERVER_INTERVAL_S, SERVER_PROBES = 10, 5, 3
"""Probe settings, times in seconds: a lost server is detected after 25 s, so that its requests can
be sent to another server."""


def keep_alive(listening: socket.socket) -> None:
    """Let every connection that ``listening`` accepts from now on send keep-alive probes.

    Probes find a peer whose host or network has failed without closing connections: the kernel of a
    live host answers them, also for a process that is busy or stopped. Linux copies the options of
    a listening socket to the accepted sockets.
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
