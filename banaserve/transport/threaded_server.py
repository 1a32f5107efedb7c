"""Listening socket of the offering side, with one thread for each connected peer."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from contextlib import suppress
from pathlib import Path

from banaserve.base.net.connections import address_of
from banaserve.base.platform.linux import MAX_SOCKET_PATH_BYTES
from banaserve.transport.errors import RefusedError

MAX_CONNECTIONS = 64
MAX_STRANGERS = 64
"""Maximum number of unauthenticated connections, of a service whose peers must first prove that
they know a secret."""
GREETING_S = 5.0
_BACKLOG = 64
_PAUSE_S = 0.05
"""Pause after a failed accept, in seconds: without free file descriptors the next one would fail at
once."""


class ConnectionPlaces:
    """Connections of a service. Thread-safe. When all places are taken, a new one is refused.

    Args:
        num_places: Maximum number of connections.
        num_strangers: Maximum number of unauthenticated connections among these. When it is
            reached, or all places are taken, the oldest unauthenticated connection of the address
            with the most of them is ended for a new one. None if no connection is ever ended for a
            new one.
    """

    def __init__(self, num_places: int = MAX_CONNECTIONS, num_strangers: int | None = None) -> None:
        self._num_places, self._num_strangers = num_places, num_strangers
        self._lock = threading.Lock()
        self._taken: dict[socket.socket, None] = {}
        self._unproved: dict[socket.socket, bytes] = {}

    def take(self, sock: socket.socket, peer: Hashable = None) -> bool:
        """Give ``sock`` a place, perhaps by ending another connection; return whether it has one.

        ``peer`` is its address as returned by ``accept``; a /64 of IPv6 counts as one.
        """
        address = address_of(peer)
        with self._lock:
            is_full = len(self._taken) >= self._num_places
            if is_full or len(self._unproved) == self._num_strangers:
                evicted = self._crowding(address)
                if evicted is None:
                    return False
                del self._taken[evicted], self._unproved[evicted]
                with suppress(OSError):
                    evicted.shutdown(socket.SHUT_RDWR)  # its thread closes it
            self._taken[sock] = None
            if self._num_strangers is not None:
                self._unproved[sock] = address
            return True

    def _crowding(self, address: bytes) -> socket.socket | None:
        """Return the connection to end for a new one from ``address``; None if there is none."""
        counts = Counter([address, *self._unproved.values()])
        return max(self._unproved, key=lambda sock: counts[self._unproved[sock]], default=None)

    def proved(self, sock: socket.socket) -> bool:
        """Mark a connection as authenticated; return whether it still has its place."""
        with self._lock:
            self._unproved.pop(sock, None)
            return sock in self._taken

    def leave(self, sock: socket.socket) -> None:
        """Close a connection and free its place."""
        with self._lock:
            self._taken.pop(sock, None)
            self._unproved.pop(sock, None)
            sock.close()

    def end_all(self) -> None:
        """Shut down every connection, which wakes the threads that serve them."""
        with self._lock:
            for sock in self._taken:
                with suppress(OSError):
                    sock.shutdown(socket.SHUT_RDWR)


class Service:
    """Service that accepts connections until ``close``. It closes all sockets.

    ``serve`` serves one peer, in a thread, until the peer closes; an exception ends only that
    connection.
    """

    def __init__(
        self,
        name: str,
        listener: socket.socket,
        serve: Callable[[socket.socket], None],
        places: ConnectionPlaces | None = None,
    ) -> None:
        self._name = name
        self._listener = listener
        self._serve = serve
        self._lock = threading.Lock()
        self._places = places or ConnectionPlaces()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end every connection."""
        with self._lock:
            self._closed = True
        # A close alone would not wake a thread that waits in accept or recv.
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._places.end_all()
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, peer = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                if self._closed or not self._places.take(sock, peer):
                    sock.close()
                    continue
            talk = threading.Thread(
                target=self._talk, args=(sock,), name=f"{self._name}-peer", daemon=True
            )
            try:
                talk.start()
            except RuntimeError:  # the process or its container has no more threads
                self._places.leave(sock)

    def _talk(self, sock: socket.socket) -> None:
        # A peer that breaks the protocol or closes ends only its own connection.
        with suppress(Exception):
            self._serve(sock)
        self._places.leave(sock)


def listen_unix(folder: str, name: str) -> tuple[socket.socket, Path]:
    """Listen on a new private socket in ``folder``; the caller removes the file.

    Raises:
        RefusedError: The folder cannot be used.
    """
    path = Path(folder) / f"{name}-{os.getpid()}-{secrets.token_hex(4)}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise RefusedError(f"{path} is too long for a socket: choose a folder of a shorter name")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The file takes its mode from the socket, so that at no time other users can connect.
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(str(path))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise RefusedError(f"cannot listen on {path}: {error.strerror}") from error
    return sock, path


def listen_tcp(host: str, port: int = 0) -> socket.socket:
    """Listen on a port of ``host``, 0 for a free one; raise RefusedError if that fails."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise RefusedError(f"cannot listen on {host}:{port}: {error.strerror or error}") from error
