"""Take-over of a server's listening socket by another server on the same machine.

The running server offers its socket on a Unix socket in a folder that only its user can read. A
claimant says at its start that it will want the socket, and takes it once it can serve. Until it
says that it does serve, the running one goes on as before: between the two both accept connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
import struct
from collections.abc import AsyncIterator, Coroutine, Sequence
from pathlib import Path
from typing import TypeVar

import msgspec

from banaserve.errors import BanaServeError, UserError

_ANSWER_S = 10.0
_MAX_MESSAGE_BYTES = 4096
_CREDENTIALS = struct.Struct("iII")
logger = logging.getLogger(__name__)
M = TypeVar("M", bound=msgspec.Struct)


class Ask(msgspec.Struct, frozen=True, tag=True):
    """The claimant will want the socket."""


class Offer(msgspec.Struct, frozen=True, tag=True):
    """The running server and the address of its socket, as its user gave it."""

    pid: int
    host: str
    port: int
    scheme: str


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Why there is nothing to take; for people."""

    why: str


class Take(msgspec.Struct, frozen=True, tag=True):
    """The claimant can serve."""


class Given(msgspec.Struct, frozen=True, tag=True):
    """The socket itself comes with this message."""


class Serves(msgspec.Struct, frozen=True, tag=True):
    """The claimant accepts connections: the running server is to accept no more."""


class Retired(msgspec.Struct, frozen=True, tag=True):
    """The server that was running accepts no more."""


Message = Ask | Offer | Refusal | Take | Given | Serves | Retired
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class ClaimLostError(BanaServeError):
    """The running server has gone, or says what it should not."""


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """Process and user at the other end of a Unix socket."""
    said = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    pid, uid, _ = _CREDENTIALS.unpack(said)
    return pid, uid


def _decoded(said: bytes) -> Message:
    if not said:
        raise ClaimLostError("the other server has ended")
    try:
        return _decoder.decode(said)
    except msgspec.DecodeError as wrong:
        raise ClaimLostError(f"the other server says what nobody knows: {wrong}") from wrong


def _read(said: bytes, kind: type[M]) -> M:
    message = _decoded(said)
    if not isinstance(message, kind):
        raise ClaimLostError(f"{type(message).__name__} came and {kind.__name__} was due")
    return message


class SocketOffer:
    """Offers a listening socket; open while its server serves.

    Args:
        path: Of the Unix socket, in a folder that only this user can read.
        listening: What is offered. It stays open here.

    Attributes:
        taken: Set once another server serves on it: this one is to accept no more.
        taker: Process id of that server.
        retired: To be set once this one accepts no more.
    """

    def __init__(self, path: Path, listening: socket.socket, offer: Offer) -> None:
        self.taken, self.retired = asyncio.Event(), asyncio.Event()
        self.taker = 0
        self._path = path
        self._listening = listening
        self._offer = offer
        self._claimant = 0
        self._tasks: set[asyncio.Task[None]] = set()

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[None]:
        """Let claimants come while the block runs."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as door:
            door.setblocking(False)
            door.bind(str(self._path))
            door.listen()
            self._begin(self._admit(door))
            try:
                yield
            finally:
                for task in self._tasks:
                    task.cancel()
                await asyncio.gather(*self._tasks, return_exceptions=True)
                self._path.unlink(missing_ok=True)

    async def _admit(self, door: socket.socket) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(door)
            self._begin(self._attend(connection))

    def _begin(self, work: Coroutine[None, None, None]) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _attend(self, connection: socket.socket) -> None:
        pid, uid = peer_of(connection)
        with connection:
            if uid != os.getuid():
                logger.warning("process %d of user %d wants the front door: refused", pid, uid)
                return
            try:
                async with asyncio.timeout(_ANSWER_S):
                    await self._next(connection, Ask)
                await self._hand_over(connection, pid)
            except (ClaimLostError, OSError, TimeoutError) as lost:
                logger.warning("process %d does not take the front door over: %s", pid, lost)

    async def _hand_over(self, connection: socket.socket, pid: int) -> None:
        if self._claimant:
            connection.send(_encode(Refusal(f"process {self._claimant} is taking it over")))
            return
        self._claimant = pid
        try:
            connection.send(_encode(self._offer))
            # Its engines start meanwhile.
            await self._next(connection, Take)
            socket.send_fds(connection, [_encode(Given())], [self._listening.fileno()])
            await self._next(connection, Serves)
            self.taker = pid
            self.taken.set()
            await self.retired.wait()
            connection.send(_encode(Retired()))
        finally:
            if not self.taken.is_set():
                self._claimant = 0

    async def _next(self, connection: socket.socket, kind: type[M]) -> M:
        loop = asyncio.get_running_loop()
        return _read(await loop.sock_recv(connection, _MAX_MESSAGE_BYTES), kind)


class SocketClaim:
    """A claim on the listening socket of a running server.

    Args:
        path: Of the Unix socket on which that one offers it.

    Attributes:
        offer: What that one says of itself.

    Raises:
        UserError: Nothing serves there, it is another user's, or does not hand over.
    """

    def __init__(self, path: Path) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(_ANSWER_S)
        try:
            self.offer = self._claimed(path)
        except BaseException:
            self.close()
            raise

    def _claimed(self, path: Path) -> Offer:
        nothing = f"--take-over: no server of this version can be asked at {path}"
        try:
            self._connection.connect(str(path))
            if peer_of(self._connection)[1] != os.getuid():
                raise UserError("--take-over: that server is another user's")
            self._connection.send(_encode(Ask()))
            said = self._connection.recv(_MAX_MESSAGE_BYTES)
            refusal = _decoded(said)
            if isinstance(refusal, Refusal):
                raise UserError(f"--take-over: {refusal.why}: wait for its end")
            return _read(said, Offer)
        except PermissionError:
            raise UserError("--take-over: that server is another user's") from None
        except TimeoutError:
            raise UserError(f"--take-over: the server at {path} does not answer") from None
        except OSError as error:
            raise UserError(f"{nothing} ({error.strerror})") from error
        except ClaimLostError as lost:
            raise UserError(f"{nothing}: {lost}") from lost

    def check(self, host: str, port: int) -> None:
        """Return if the socket is that of this address.

        Raises:
            UserError: It is another's.
        """
        if (self.offer.host, self.offer.port) != (host, port):
            raise UserError(
                f"--take-over: the running server listens on {self.offer.host}:{self.offer.port} "
                f"and not on {host}:{port}: give its --host and --port"
            )

    def check_scheme(self, scheme: str) -> None:
        """Return if clients of the running server can go on with this one.

        Raises:
            UserError: One of the two serves TLS and the other does not.
        """
        if self.offer.scheme != scheme:
            raise UserError(
                f"--take-over: clients of the running server speak {self.offer.scheme} and this "
                f"one would serve {scheme}: give both TLS (--ssl-certfile), or neither"
            )

    def take(self) -> socket.socket:
        """The listening socket. Blocking.

        Raises:
            ClaimLostError: The server has gone, or gives something else.
        """
        try:
            self._connection.send(_encode(Take()))
            said, numbers, _, _ = socket.recv_fds(
                self._connection, _MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as gone:
            raise ClaimLostError(f"the other server has gone ({gone})") from gone
        try:
            _read(said, Given)
            return _listening(numbers)
        except BaseException:
            for number in numbers:
                os.close(number)
            raise

    def serves(self) -> None:
        """Tell the other server that this one accepts connections; returns when it does no more.

        Blocking.

        Raises:
            ClaimLostError: It has gone, or does not answer: it may still accept some.
        """
        try:
            self._connection.send(_encode(Serves()))
            _read(self._connection.recv(_MAX_MESSAGE_BYTES), Retired)
        except OSError as gone:
            raise ClaimLostError(f"the other server has gone ({gone})") from gone

    def close(self) -> None:
        """Ask it no more."""
        self._connection.close()


def _listening(numbers: Sequence[int]) -> socket.socket:
    """The socket of the only descriptor, where that is one that listens."""
    with contextlib.suppress(OSError, ValueError):
        (number,) = numbers
        given = socket.socket(fileno=number)
        is_tcp = given.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return given
        given.detach()
    raise ClaimLostError("the other server gives no socket that listens")
