"""Listening socket of the front door: bound at the start, or another server's, taken over."""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable
from typing import Protocol

from banaserve.api.take_over import ClaimLostError, SocketClaim
from banaserve.errors import UserError

Say = Callable[[str], None]
_BACKLOG = 2048
_FREE_AGAIN_S, _POLL_S = 10.0, 0.1
logger = logging.getLogger(__name__)


class FrontSocket(Protocol):
    """How a server gets the socket that it listens on, once it can serve."""

    def check_scheme(self, scheme: str) -> None: ...

    async def obtain(self, say: Say) -> socket.socket: ...

    async def serves(self, say: Say) -> None: ...


def bind(host: str, port: int) -> socket.socket:
    """A socket that listens; the caller closes it.

    Raises:
        UserError: The port is taken, or the address is not this machine's.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((host, port))
        sock.listen(_BACKLOG)
    except (OSError, TypeError) as error:
        sock.close()
        # TypeError: a name that cannot be one, such as one with an empty part.
        why = error.strerror if isinstance(error, OSError) else "no name of a host"
        raise UserError(
            f"cannot listen on {host}:{port} ({why}): stop what listens there or choose another "
            "--port"
        ) from error
    return sock


class BoundSocket:
    """A socket of one's own, bound at the start: a port that is taken later costs minutes."""

    def __init__(self, host: str, port: int) -> None:
        self._sock = bind(host, port)

    def check_scheme(self, scheme: str) -> None:
        """Return: there is nobody whose clients have another."""

    async def obtain(self, say: Say) -> socket.socket:
        """The socket."""
        return self._sock

    async def serves(self, say: Say) -> None:
        """Return: there is nobody to tell."""

    def close(self) -> None:
        self._sock.close()


class ClaimedSocket:
    """The socket of a server that runs, claimed at the start and taken once this one can serve.

    Where that server has ended before, the address is bound as at any other start.

    Raises:
        UserError: That server listens elsewhere.
    """

    def __init__(self, claim: SocketClaim, host: str, port: int) -> None:
        claim.check(host, port)
        self._claim = claim
        self._host, self._port = host, port

    def check_scheme(self, scheme: str) -> None:
        """Return if clients of the running server can go on with this one.

        Raises:
            UserError: They cannot.
        """
        self._claim.check_scheme(scheme)

    async def obtain(self, say: Say) -> socket.socket:
        """The socket; the running server still accepts connections on it.

        Raises:
            UserError: That server has gone and its address cannot be bound.
        """
        try:
            return await asyncio.to_thread(self._claim.take)
        except ClaimLostError as lost:
            say(f"nothing to take over ({lost}): listening anew")
            logger.warning("nothing to take over: %s", lost)
            return await self._bound()

    async def serves(self, say: Say) -> None:
        """Tell the running server, and return when it accepts no more connections."""
        try:
            await asyncio.to_thread(self._claim.serves)
        except ClaimLostError as lost:
            logger.warning("the other server may still accept connections: %s", lost)
        else:
            say(f"took the front door over from process {self._claim.offer.pid}")

    async def _bound(self) -> socket.socket:
        """That server's engines have its socket too, until they have ended."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _FREE_AGAIN_S
        while True:
            try:
                return bind(self._host, self._port)
            except UserError:
                if loop.time() >= deadline_s:
                    raise
            await asyncio.sleep(_POLL_S)
