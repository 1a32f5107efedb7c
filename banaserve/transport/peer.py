"""Whether the process at the other end of a connection lives, asked without waiting."""

from __future__ import annotations

import os
import select
import socket
from contextlib import suppress

from banaserve.linux import open_peer_pidfd
from banaserve.transport.errors import PeerGoneError


class PeerWatch:
    """Watches a connection on which the peer says nothing more, and the peer's process.

    Args:
        sock: Connected; closed by ``close``.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | select.POLLRDHUP)
        self._pidfd = -1
        if sock.family == socket.AF_UNIX:
            with suppress(OSError):
                self._pidfd = open_peer_pidfd(sock)
                self._poll.register(self._pidfd, select.POLLIN)

    def check(self) -> None:
        """Raise where the peer has gone.

        Raises:
            PeerGoneError: It has died or closed the connection.
        """
        if self._poll.poll(0):
            raise PeerGoneError("the peer has died or closed its transport")

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
