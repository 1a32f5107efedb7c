"""TLS: contexts with modern cipher suites, certificates that are reloaded, and a listener."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import ssl
from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Protocol

from banaserve.base.errors import UserError
from banaserve.base.net.connections import ConnectionTable
from banaserve.base.net.sockets import is_own_fault

SUITES = "ECDHE+AESGCM:ECDHE+CHACHA20"
"""Cipher suites of TLS 1.2, only those with forward secrecy and authenticated encryption, as all
suites of TLS 1.3 are."""

Stamps = tuple[tuple[int, int, int] | None, ...]


@dataclass(frozen=True, slots=True)
class ServerTls:
    """TLS settings of a server.

    Attributes:
        certificate: File with the certificate and its chain.
        key: File with the certificate's key; empty if the certificate's file holds the key.
        client_ca: File with authorities of clients' certificates; empty for none.
        client_certificates: Need of client certificates: ``ssl.CERT_NONE``, ``ssl.CERT_OPTIONAL``
            or ``ssl.CERT_REQUIRED``.
        suites: Cipher suites of TLS 1.2, in OpenSSL's form; empty for ``SUITES``.
    """

    certificate: str
    key: str = ""
    client_ca: str = ""
    client_certificates: int = ssl.CERT_NONE
    suites: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        return tuple(name for name in (self.certificate, self.key, self.client_ca) if name)

    def context(self) -> ssl.SSLContext:
        """Return a context made from the current files.

        Raises:
            UserError: The files or the names of suites are not valid.
        """
        made = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        made.options |= ssl.OP_NO_RENEGOTIATION | ssl.OP_CIPHER_SERVER_PREFERENCE
        try:
            made.set_ciphers(self.suites or SUITES)
        except ssl.SSLError:
            raise UserError(
                f"{self.suites!r} names no cipher suite of TLS 1.2: give OpenSSL's names, or none"
            ) from None
        try:
            made.load_cert_chain(self.certificate, self.key or None)
            if self.client_ca:
                made.load_verify_locations(self.client_ca)
        except ssl.SSLError as error:
            raise UserError(
                f"{' '.join(self.files)}: give a certificate and its key in PEM: {error}"
            ) from error
        except OSError as error:
            raise UserError(f"{' '.join(self.files)}: {error.strerror or error}") from error
        made.verify_mode = ssl.VerifyMode(self.client_certificates)
        return made


@dataclass(frozen=True, slots=True)
class ClientTls:
    """TLS settings of a client.

    Attributes:
        ca: File with certificates of trusted authorities; empty for the system's.
    """

    ca: str = ""

    @property
    def files(self) -> tuple[str, ...]:
        return (self.ca,) if self.ca else ()

    def context(self) -> ssl.SSLContext:
        """Return a context that checks certificates and host names, made from the current file.

        Raises:
            UserError: The file holds no certificate.
        """
        try:
            made = ssl.create_default_context(cafile=self.ca or None)
        except OSError as error:
            raise UserError(f"{self.ca}: {error.strerror or error}") from error
        made.minimum_version = ssl.TLSVersion.TLSv1_2
        return made


class Certificates:
    """TLS context that is made anew when its files change.

    Attributes:
        context: Context for new connections; open connections keep theirs.
    """

    def __init__(self, tls: ServerTls | ClientTls, log: Callable[[str], None]) -> None:
        """
        Raises:
            UserError: The files are not valid.
        """
        self._tls, self._log = tls, log
        self._loaded = self._tried = _stamps(tls.files)
        self.context = tls.context()

    def look(self) -> None:
        """Read the files again if they have changed; files that are not valid are ignored."""
        stamps = _stamps(self._tls.files)
        if stamps == self._loaded or stamps == self._tried:
            return
        self._tried = stamps
        try:
            self.context = self._tls.context()
        except UserError as error:  # a new certificate may be written before its key
            self._log(f"{error}: going on with the certificates as before")
            return
        self._loaded = stamps
        self._log(f"{' '.join(self._tls.files)}: read again")


def _stamps(files: tuple[str, ...]) -> Stamps:
    return tuple(_stamp(name) for name in files)


def _stamp(name: str) -> tuple[int, int, int] | None:
    try:
        state = os.stat(name)
    except OSError:
        return None
    return state.st_mtime_ns, state.st_size, state.st_ino


_ACCEPTS_AT_ONCE = 64
_PAUSE_S = 0.1


class ClientListener(Protocol):
    """Listener that accepts connections until it is closed."""

    def close(self) -> None: ...


class TlsListener:
    """Listener that passes each connection to a protocol of ``factory`` after its handshake.

    It counts a connection from the moment it is accepted: a server of asyncio reports a connection
    only after the handshake, which a silent client never completes. The protocol replaces its
    handshake in ``table`` when it adds itself there.

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
