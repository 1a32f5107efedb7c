"""Listener for TLS that counts a connection from the moment it is accepted.

A server of asyncio reports a connection to its protocol only after the handshake, which a silent
client never completes.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Callable, Hashable
from typing import Protocol

from banaserve.base.net.connections import ConnectionTable
from banaserve.base.net.descriptors import is_own_fault
from banaserve.base.net.tls import Certificates

_ACCEPTS_AT_ONCE = 64
_PAUSE_S = 0.1


class ClientListener(Protocol):
    """Listener that accepts connections until it is closed."""

    def close(self) -> None: ...


class TlsListener:
    """Listener that passes each connection to a protocol of ``factory`` after its handshake.

    The protocol replaces its handshake in ``table`` when it adds itself there.

    Args:
        handshake_s: Maximum time of a handshake, in seconds.
        on_failed: Called with the cause of each connection that does not reach a protocol.
    """

    def __init__(
        self,
        sock: socket.socket,
        factory: Callable[[], asyncio.Protocol],
        certificates: Certificates,
        table: ConnectionTable,
        handshake_s: float,
        on_failed: Callable[[str], None],
    ) -> None:
        self._sock, self._factory, self._certificates = sock, factory, certificates
        self._table, self._handshake_s, self._on_failed = table, handshake_s, on_failed
        self._loop = asyncio.get_running_loop()
        self._resuming: asyncio.TimerHandle | None = None
        self._is_open = True
        sock.setblocking(False)
        self._loop.add_reader(sock.fileno(), self._accept)

    def close(self) -> None:
        """Accept no more connections; open ones go on. The socket is left open."""
        if not self._is_open:
            return
        self._is_open = False
        if self._resuming is not None:
            self._resuming.cancel()
        self._loop.remove_reader(self._sock.fileno())

    async def wait_closed(self) -> None:
        """Return at once: there is nothing to wait for."""

    def _accept(self) -> None:
        for _ in range(_ACCEPTS_AT_ONCE):
            try:
                sock, peer = self._sock.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:
                if not is_own_fault(error):
                    raise
                # The socket stays readable: without a pause the loop would do nothing else.
                self._loop.remove_reader(self._sock.fileno())
                self._resuming = self._loop.call_later(_PAUSE_S, self._resume)
                self._on_failed("no_descriptors")
                return
            sock.setblocking(False)
            self._admit(sock, peer)

    def _resume(self) -> None:
        self._resuming = None
        self._loop.add_reader(self._sock.fileno(), self._accept)

    def _admit(self, sock: socket.socket, peer: Hashable) -> None:
        handshake = _Handshake(sock)
        evicted = self._table.add(handshake, peer)
        if evicted is handshake:
            self._on_failed("connections")
            sock.close()
            return
        if evicted is not None:
            self._on_failed("connections")
            evicted.evict()
        handshake.task = self._loop.create_task(self._shake(handshake, peer))
        handshake.task.add_done_callback(handshake.ended)

    async def _shake(self, handshake: _Handshake, peer: Hashable) -> None:
        try:
            await self._loop.connect_accepted_socket(
                self._factory,
                handshake.sock,
                ssl=self._certificates.context,
                ssl_handshake_timeout=self._handshake_s,
            )
        except OSError:  # includes data that is no TLS, and a handshake that takes too long
            self._on_failed("tls_handshake")
            handshake.sock.close()
        finally:
            self._table.remove(handshake, peer)


class _Handshake:
    def __init__(self, sock: socket.socket) -> None:
        self.sock = sock
        self.task: asyncio.Task[None] | None = None

    def evict(self) -> None:
        if self.task is not None:
            self.task.cancel()
        with contextlib.suppress(OSError):
            self.sock.shutdown(socket.SHUT_RDWR)

    def ended(self, task: asyncio.Task[None]) -> None:
        if task.cancelled():  # perhaps before its first step
            self.sock.close()

    def sweep(self, now_s: float) -> None:
        """Return at once: the handshake has its own time limit."""
