"""Listening socket of the offering side, with one thread for each connected peer."""

from __future__ import annotations

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from banaserve.platform.linux import MAX_SOCKET_PATH_BYTES
from banaserve.transport.errors import RefusedError

MAX_PEERS = 64
GREETING_S = 5.0
_BACKLOG = 64
_PAUSE_S = 0.05
"""After a failed accept: where file descriptors have run out, the next one would fail at once."""


class Service:
    """Accepts connections until ``close``.

    Args:
        name: Of the threads.
        listener: A listening socket, which the service closes.
        serve: Talks with one peer until it goes; the socket is closed for it. What it raises ends
            that connection alone.
    """

    def __init__(
        self, name: str, listener: socket.socket, serve: Callable[[socket.socket], None]
    ) -> None:
        self._name = name
        self._listener = listener
        self._serve = serve
        self._lock = threading.Lock()
        self._peers: set[socket.socket] = set()
        self._closed = False
        self._thread = threading.Thread(target=self._accept, name=name, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening and end every connection."""
        with self._lock:
            self._closed = True
            peers = list(self._peers)
        # A close alone would not wake a thread that waits in accept or recv.
        for sock in (self._listener, *peers):
            with suppress(OSError):
                sock.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _accept(self) -> None:
        while True:
            try:
                sock, _ = self._listener.accept()
            except OSError:
                if self._closed:
                    return
                time.sleep(_PAUSE_S)
                continue
            with self._lock:
                if self._closed or len(self._peers) >= MAX_PEERS:
                    sock.close()
                    continue
                self._peers.add(sock)
            threading.Thread(
                target=self._talk, args=(sock,), name=f"{self._name}-peer", daemon=True
            ).start()

    def _talk(self, sock: socket.socket) -> None:
        # A peer that sends nonsense or goes costs its own connection and nothing else.
        with suppress(Exception):
            self._serve(sock)
        with self._lock:
            self._peers.discard(sock)
            sock.close()


def listen_unix(folder: str, name: str) -> tuple[socket.socket, Path]:
    """Listen on a fresh private socket in ``folder``; the caller removes the file.

    Raises:
        RefusedError: The folder cannot be used.
    """
    path = Path(folder) / f"{name}-{os.getpid()}-{secrets.token_hex(4)}.sock"
    if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
        raise RefusedError(f"{path} is too long for a socket: choose a folder of a shorter name")
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        # The file takes its mode from the socket, so there is no moment at which others could
        # connect.
        os.fchmod(sock.fileno(), 0o600)
        sock.bind(str(path))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise RefusedError(f"cannot listen on {path}: {error.strerror}") from error
    return sock, path


def listen_tcp(host: str) -> socket.socket:
    """Listen on a free port of ``host``.

    Raises:
        RefusedError: The address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.bind((host, 0))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise RefusedError(f"cannot listen on {host}: {error}") from error
    return sock
