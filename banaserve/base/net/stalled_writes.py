"""Watch over data that a client does not read, to detect clients that read nothing at all."""

from __future__ import annotations

import fcntl
import struct
import termios
from asyncio import Transport


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
    """Return the number of bytes that wait for a client in the transport and the kernel.

    Without TLS it is 0 while the transport holds none. The kernel's bytes count because it takes
    more from the transport only once a third of its own buffer, often a megabyte, is free. Over TLS
    the buffer between the two does not count, since event loops do not report its size.
    """
    waiting = transport.get_write_buffer_size()
    sock = transport.get_extra_info("socket")
    if sock is None or not (waiting or transport.get_extra_info("sslcontext")):
        return waiting
    try:
        (unsent,) = struct.unpack("i", fcntl.ioctl(sock.fileno(), termios.TIOCOUTQ, bytes(4)))
    except (OSError, ValueError):  # it is closed
        return waiting
    return waiting + int(unsent)
