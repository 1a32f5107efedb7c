"""Watch over what a client does not read: a slow reader goes on, one that stands still does not."""

from __future__ import annotations

import fcntl
import struct
import termios
from asyncio import Transport


class StalledWrites:
    """How long the bytes that wait for one client have not become fewer or more.

    More of them is life too: senders stop at the transport's high-water mark, so a client that
    reads nothing soon has a number that stays.
    """

    __slots__ = ("_num_bytes", "_since_s")

    def __init__(self) -> None:
        self._num_bytes = 0
        self._since_s = 0.0

    def stalled_s(self, num_bytes: int, now_s: float) -> float:
        """Seconds since which ``num_bytes`` have waited; 0 where none do, or some have gone."""
        if num_bytes != self._num_bytes or not num_bytes:
            self._num_bytes, self._since_s = num_bytes, now_s
        return now_s - self._since_s


def num_unread_bytes(transport: Transport) -> int:
    """Bytes that wait for a client: of the transport and, over TLS, in the kernel too.

    Between the two lie those of the transport below TLS, which no event loop tells: while there are
    any, the kernel's buffer is full.
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
