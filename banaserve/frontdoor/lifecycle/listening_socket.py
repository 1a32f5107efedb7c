"""Listening socket of the front door: bound at the start, or taken over from a running server.

The running server offers its socket on a Unix socket in a folder that only its user can read. A
claimant announces at its start that it will want the socket, and takes it once it can serve. The
running server serves on until the claimant reports that it serves: for a moment both accept
connections.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from banaserve.base.errors import BanaServeError, UserError
from banaserve.base.platform.linux import peer_of
from banaserve.base.tasks import end_tasks

Say = Callable[[str], None]
_BACKLOG = 2048
_ANSWER_S = 10.0
_FREE_AGAIN_S, _POLL_S = 10.0, 0.1
_MAX_MESSAGE_BYTES = 4096
logger = logging.getLogger(__name__)


def bind(host: str, port: int, is_shared: bool = False) -> socket.socket:
    """Return a listening socket; the caller closes it.

    Args:
        is_shared: True if shared sockets of the same user may listen at the address too.

    Raises:
        UserError: The port is in use, or the address is not this machine's.
    """
    sock = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if is_shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
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


class FrontSocket:
    """Socket that a server listens on once it can serve; bound at the start.

    So a port in use is found before the engines' minutes of starting.
    """

    def __init__(self, host: str, port: int) -> None:
        self._sock = bind(host, port)

    def check_scheme(self, scheme: str) -> None:
        """Check that clients of a server that is replaced can go on with this one; none here."""

    async def obtain(self, say: Say) -> socket.socket:
        """Return the socket."""
        return self._sock

    async def serves(self, say: Say) -> None:
        """Tell a server that is replaced to retire; none here."""

    def close(self) -> None:
        self._sock.close()


class Offer(msgspec.Struct, frozen=True, tag=True):
    """Message: the running server and the address of its socket, as its user gave it."""

    pid: int
    host: str
    port: int
    scheme: str


class Refusal(msgspec.Struct, frozen=True, tag=True):
    """Message: the reason, in words, why the socket cannot be taken over."""

    why: str


Word = Literal["ask", "take", "given", "serves", "retired"]
"""Messages without content, in their order.

A claimant asks, and gets an offer or a refusal; takes the socket once it can serve, and is given
it; reports that it serves, and is told that the other server has retired: it accepts no more
connections.
"""
Message = Offer | Refusal | Word
_encode = msgspec.msgpack.Encoder().encode
_decoder: msgspec.msgpack.Decoder[Message] = msgspec.msgpack.Decoder(Message)


class ClaimLostError(BanaServeError):
    """Error: the running server has ended, or has sent an unexpected message."""


def _decoded(said: bytes, due: Word | None = None) -> Message:
    """Return a message; raise ClaimLostError if there is none, or another one than ``due``."""
    if not said:
        raise ClaimLostError("the other server has ended")
    try:
        message = _decoder.decode(said)
    except msgspec.DecodeError as wrong:
        raise ClaimLostError(f"the other server says what nobody knows: {wrong}") from wrong
    if due is not None and message != due:
        raise ClaimLostError(f"{message} came and {due} was due")
    return message


class SocketOffer:
    """Offer of a listening socket, open while its server serves.

    Args:
        path: Path of the Unix socket, in a folder that only this user can read.
        listening: Offered socket; it stays open in this process.

    Attributes:
        taken: Event set once another server serves on the socket: this server is to accept no
            more connections.
        taker: Process id of the other server.
        retired: Event to be set once this server accepts no more connections.
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
        """Accept claimants while the block runs."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.setblocking(False)
            listener.bind(str(self._path))
            listener.listen()
            self._begin(self._admit(listener))
            try:
                yield
            finally:
                await end_tasks(*self._tasks)
                self._path.unlink(missing_ok=True)

    async def _admit(self, listener: socket.socket) -> None:
        while True:
            connection, _ = await asyncio.get_running_loop().sock_accept(listener)
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
                    await self._expect(connection, "ask")
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
            # The claimant's engines start meanwhile, so this wait has no timeout.
            await self._expect(connection, "take")
            socket.send_fds(connection, [_encode("given")], [self._listening.fileno()])
            await self._expect(connection, "serves")
            self.taker = pid
            self.taken.set()
            await self.retired.wait()
            connection.send(_encode("retired"))
        finally:
            if not self.taken.is_set():
                self._claimant = 0

    async def _expect(self, connection: socket.socket, due: Word) -> None:
        loop = asyncio.get_running_loop()
        _decoded(await loop.sock_recv(connection, _MAX_MESSAGE_BYTES), due)


class SocketClaim(FrontSocket):
    """Socket of a running server, claimed at the start and taken once this server can serve.

    If the running server ends before that, its address is bound as at any other start.

    Args:
        path: Path of the Unix socket on which the running server offers its socket.
        host, port: Address that the socket must have.

    Attributes:
        offer: Offer of the running server.

    Raises:
        UserError: No server offers its socket there, the server is another user's or refuses, or
            the socket has another address.
    """

    def __init__(self, path: Path, host: str, port: int) -> None:
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(_ANSWER_S)
        try:
            self.offer = self._claimed(path)
            if (self.offer.host, self.offer.port) != (host, port):
                raise UserError(
                    f"--take-over: the running server listens on {self.offer.host}:"
                    f"{self.offer.port} and not on {host}:{port}: give its --host and --port"
                )
        except BaseException:
            self.close()
            raise

    def _claimed(self, path: Path) -> Offer:
        nothing = f"--take-over: no server of this version can be asked at {path}"
        try:
            self._connection.connect(str(path))
            if peer_of(self._connection)[1] != os.getuid():
                raise PermissionError
            self._connection.send(_encode("ask"))
            match _decoded(self._connection.recv(_MAX_MESSAGE_BYTES)):
                case Offer() as offer:
                    return offer
                case Refusal(why):
                    raise UserError(f"--take-over: {why}: wait for its end")
                case word:
                    raise ClaimLostError(f"{word} came and an offer was due")
        except PermissionError:
            raise UserError("--take-over: that server is another user's") from None
        except TimeoutError:
            raise UserError(f"--take-over: the server at {path} does not answer") from None
        except OSError as error:
            raise UserError(f"{nothing} ({error.strerror})") from error
        except ClaimLostError as lost:
            raise UserError(f"{nothing}: {lost}") from lost

    def check_scheme(self, scheme: str) -> None:
        """Check that clients of the running server can go on with this one.

        Raises:
            UserError: One of the two serves TLS and the other does not.
        """
        if self.offer.scheme != scheme:
            raise UserError(
                f"--take-over: clients of the running server speak {self.offer.scheme} and this "
                f"one would serve {scheme}: give both TLS (--ssl-certfile), or neither"
            )

    async def obtain(self, say: Say) -> socket.socket:
        """Return the socket; the running server still accepts connections on it.

        Raises:
            UserError: The running server has ended and its address cannot be bound.
        """
        try:
            return await asyncio.to_thread(self.take)
        except ClaimLostError as lost:
            say(f"nothing to take over ({lost}): listening anew")
            logger.warning("nothing to take over: %s", lost)
            return await self._bound()

    async def serves(self, say: Say) -> None:
        """Tell the running server to retire; return when it accepts no more connections."""
        try:
            await asyncio.to_thread(self.report)
        except ClaimLostError as lost:
            logger.warning("the other server may still accept connections: %s", lost)
        else:
            say(f"took the front door over from process {self.offer.pid}")

    async def _bound(self) -> socket.socket:
        """Bind the address, with retries: the ended server's engines may still hold its socket."""
        loop = asyncio.get_running_loop()
        deadline_s = loop.time() + _FREE_AGAIN_S
        while True:
            try:
                return bind(self.offer.host, self.offer.port)
            except UserError:
                if loop.time() >= deadline_s:
                    raise
            await asyncio.sleep(_POLL_S)

    def take(self) -> socket.socket:
        """Return the running server's socket. Blocking.

        Raises:
            ClaimLostError: The running server has ended, or sends no listening socket.
        """
        try:
            self._connection.send(_encode("take"))
            said, numbers, _, _ = socket.recv_fds(
                self._connection, _MAX_MESSAGE_BYTES, 1, socket.MSG_CMSG_CLOEXEC
            )
        except OSError as gone:
            raise ClaimLostError(f"the other server has gone ({gone})") from gone
        try:
            _decoded(said, "given")
            return _listening(numbers)
        except BaseException:
            for number in numbers:
                os.close(number)
            raise

    def report(self) -> None:
        """Report that this server accepts connections; return when the other accepts no more.

        Blocking.

        Raises:
            ClaimLostError: The other server has ended, or does not answer and may still accept
                connections.
        """
        try:
            self._connection.send(_encode("serves"))
            _decoded(self._connection.recv(_MAX_MESSAGE_BYTES), "retired")
        except OSError as gone:
            raise ClaimLostError(f"the other server has gone ({gone})") from gone

    def close(self) -> None:
        self._connection.close()


def _listening(numbers: Sequence[int]) -> socket.socket:
    """Return the socket of the only descriptor; raise ClaimLostError unless it is listening TCP."""
    with contextlib.suppress(OSError, ValueError):
        (number,) = numbers
        given = socket.socket(fileno=number)
        is_tcp = given.family in (socket.AF_INET, socket.AF_INET6)
        if is_tcp and given.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
            return given
        given.detach()
    raise ClaimLostError("the other server gives no socket that listens")
