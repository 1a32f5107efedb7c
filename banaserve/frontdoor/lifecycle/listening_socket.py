"""Listening socket of the front door: bound at the start, or taken over from another server."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Protocol

from banaserve.base.errors import UserError
from banaserve.frontdoor.lifecycle.take_over import ClaimLostError, SocketClaim

Say = Callable[[str], None]
_BACKLOG = 2048
_FREE_AGAIN_S, _POLL_S = 10.0, 0.1
logger = logging.getLogger(__name__)


class FrontSocket(Protocol):
    """Source of the socket that a server listens on once it can serve."""

    def check_scheme(self, scheme: str) -> None: ...

    async def obtain(self, say: Say) -> socket.socket: ...

    async def serves(self, say: Say) -> None: ...


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


class ClaimedSocket:
    """Socket of a running server, claimed at the start and taken once this server can serve.

    If the running server ends before that, its address is bound as at any other start.

    Raises:
        UserError: The running server listens on another address.
    """

    def __init__(self, claim: SocketClaim, host: str, port: int) -> None:
        claim.check(host, port)
        self._claim = claim
        self._host, self._port = host, port

    def check_scheme(self, scheme: str) -> None:
        """Check that clients of the running server can go on with this one.

        Raises:
            UserError: One of the two serves TLS and the other does not.
        """
        self._claim.check_scheme(scheme)

    async def obtain(self, say: Say) -> socket.socket:
        """Return the socket; the running server still accepts connections on it.

        Raises:
            UserError: The running server has ended and its address cannot be bound.
        """
        try:
            return await asyncio.to_thread(self._claim.take)
        except ClaimLostError as lost:
            say(f"nothing to take over ({lost}): listening anew")
            logger.warning("nothing to take over: %s", lost)
            return await self._bound()

    async def serves(self, say: Say) -> None:
        """Tell the running server to retire; return when it accepts no more connections."""
        try:
            await asyncio.to_thread(self._claim.serves)
        except ClaimLostError as lost:
            logger.warning("the other server may still accept connections: %s", lost)
        else:
            say(f"took the front door over from process {self._claim.offer.pid}")

    async def _bound(self) -> socket.socket:
        """Bind the address, with retries: the ended server's engines may still hold its socket."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _FREE_AGAIN_S
        while True:
            try:
                return bind(self._host, self._port)
            except UserError:
                if loop.time() >= deadline_s:
                    raise
            await asyncio.sleep(_POLL_S)
