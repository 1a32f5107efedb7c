"""Sockets and descriptors: their number, keep-alive, and data that a client does not read."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import socket
import struct
import termios
from asyncio import Transport
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


class StalledWrites:
    """Timer of how long the number of bytes that wait for one client has not changed.

    A growing number counts as a change too: senders stop at the transport's high-water mark, so for
    a client that reads nothing the number soon stays constant.
    """

    __slots__ = ("_num_bytes", "_since_s")

    def __init__(self) -> None:
        self._num_bytes = 0
        self._since_s = 0.0

    def stalled_s(self, num_bytes: int, now_s: float) -> float:
        """Return the seconds since the number of waiting bytes changed; 0 if no bytes wait."""
        if num_bytes != self._num_bytes or not num_bytes:
            self._num_bytes, self._since_s = num_bytes, now_s
        return now_s - self._since_s


def num_unread_bytes(transport: Transport) -> int:
    """Return the number of bytes that wait for a client in the transport or, over TLS, the kernel.

    Between the two is the buffer of the transport below TLS, whose size event loops do not report:
    while it holds bytes, the kernel's buffer is full.
    """
    waiting = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    if waiting or sock is None or transport.get_extra_info("sslcontext") is None:
        return waiting
    try:
        (unsent,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
    except (OSError, ValueError):  # it is closed
        return 0
    return int(unsent)
