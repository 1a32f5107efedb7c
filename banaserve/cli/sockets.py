"""Checks of port and certificates before anything slow happens."""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Iterator

from banaserve.errors import UserError


@contextlib.contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Yields a socket that listens: finding out later that the port is taken costs minutes.

    Raises:
        UserError: The port is taken, or the address is not this machine's.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as sock:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            sock.bind((host, port))
            sock.listen(2048)
        except (OSError, TypeError) as error:
            # TypeError: a name that cannot be one, such as one with an empty part.
            why = error.strerror if isinstance(error, OSError) else "no name of a host"
            raise UserError(
                f"cannot listen on {host}:{port} ({why}): stop what "
                "listens there or choose another --port"
            ) from error
        yield sock


def check_tls(certificate: str | None, key: str | None) -> None:
    """Return if the files can serve TLS, or none is given.

    Raises:
        UserError: They cannot.
    """
    if certificate is None and key is None:
        return
    if certificate is None:
        raise UserError(f"--ssl-keyfile {key}: give its certificate too, in --ssl-certfile")
    try:
        ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER).load_cert_chain(certificate, key)
    except OSError as error:
        files = " ".join(name for name in (certificate, key) if name)
        why = error.strerror or str(error)
        raise UserError(f"--ssl-certfile, --ssl-keyfile {files}: {why}") from error
