"""Front door's socket and certificates, checked before anything slow happens."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

from banaserve.base.config import ServeConfig
from banaserve.base.errors import UserError
from banaserve.base.net.tls import ServerTls
from banaserve.base.run_dir import find_offer
from banaserve.frontdoor.lifecycle.listening_socket import BoundSocket, FrontSocket
from banaserve.frontdoor.lifecycle.take_over import SocketClaim


@contextlib.contextmanager
def front_socket(config: ServeConfig) -> Iterator[FrontSocket]:
    """Yield the socket of the front door, bound, or claimed from the server that has it.

    Raises:
        UserError: The address is in use or not this machine's, or no server there can be taken
            over.
    """
    address = config.host, config.port
    front: FrontSocket
    if config.take_over is None:
        front = BoundSocket(*address)
    else:
        front = SocketClaim(find_offer(config.take_over.run_dir, config.port), *address)
    with contextlib.closing(front):
        yield front


def check_tls(
    certificate: str | None, key: str | None, ca: str | None = None, suites: str | None = None
) -> None:
    """Check that the files and suites can serve TLS, if any are given.

    Raises:
        UserError: TLS cannot be served with them.
    """
    if not certificate:
        if key:
            raise UserError(f"--ssl-keyfile {key}: give its certificate too, in --ssl-certfile")
        return
    try:
        ServerTls(certificate, key or "", ca or "", suites=suites or "").context()
    except UserError as error:
        raise UserError(f"--ssl-certfile: {error}") from None
