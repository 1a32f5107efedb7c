"""Listening socket of the front door, bound at the start; ``take_over`` has the other source."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Protocol

from banaserve.base.errors import UserError

Say = Callable[[str], None]
_BACKLOG = 2048


class FrontSocket(Protocol):
    """Source of the socket that a server listens on once it can serve."""

    def check_scheme(self, scheme: str) -> None: ...

    async def obtain(self, say: Say) -> socket.socket: ...

    async def serves(self, say: Say) -> None: ...

    def close(self) -> None: ...


def bind(host: str, port: int) -> socket.socket:
    """Return a listening socket; the caller closes it.

    Raises:
        UserError: The port is in use, or the address is not this machine's.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except (OSError, TypeError) as error:
        sock.close()
        # TypeError: a text that cannot be a host name, such as one with an empty part.
        why = error.strerror if isinstance(error, OSError) else "no name of a host"
        raise UserError(
            f"cannot listen on {host}:{port} ({why}): stop what listens there or choose another "
            "--port"
        ) from error
    return sock


class BoundSocket:
    """Socket bound at the start: a port in use is found before the engines' minutes of starting."""

    def __init__(self, host: str, port: int) -> None:
        self._sock = bind(host, port)

    def check_scheme(self, scheme: str) -> None:
        """Return at once: there are no clients of another server."""

    async def obtain(self, say: Say) -> socket.socket:
        """Return the socket."""
        return self._sock

    async def serves(self, say: Say) -> None:
        """Return at once: there is no other server to tell."""

    def close(self) -> None:
        self._sock.close()
