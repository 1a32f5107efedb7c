"""TLS: contexts with modern cipher suites, and certificates that are reloaded when files change."""

from __future__ import annotations

import os
import ssl
from collections.abc import Callable
from dataclasses import dataclass

from banaserve.base.errors import UserError

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
