"""One connection to the store, seen from a client: a request out, its reply in."""

from __future__ import annotations

import os
import socket
import struct
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from banaserve.errors import FingerprintError, ProtocolError, StoreUnavailableError
from banaserve.kvstore import wire
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.linux import is_own, peer_of

_RECEIVE_BYTES = 64 * 1024
_NUM_FDS = 2
R = TypeVar("R", bound=wire.Reply)


class StoreChannel:
    """A greeted connection. Not thread-safe.

    A reply that comes after its request has timed out is not lost: it is handed to ``on_late``
    when it arrives, so that what it grants can be given back.

    Attributes:
        welcome: The store's answer to Hello.
        fds: Of pool and board, until ``close_fds``; empty without a fingerprint.
    """

    def __init__(
        self,
        socket_path: Path,
        client_name: str,
        fingerprint: Fingerprint | None,
        timeout_s: float,
        on_late: Callable[[wire.Reply], None],
    ) -> None:
        """Connect and greet.

        Raises:
            StoreUnavailableError: Nobody listens, or nobody answers in time.
            FingerprintError: The store refuses to share blocks with this client.
        """
        self.fds: list[int] = []
        self._on_late = on_late
        self._late_seqs: deque[int] = deque()
        self._last_seq = 0
        self._reader: wire.FrameReader[wire.Reply] = wire.FrameReader(wire.Reply)
        self._arrived: deque[wire.Reply] = deque()
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _set_kernel_timeout(self._sock, timeout_s)
            self._sock.connect(str(socket_path))
            _check_owner(self._sock)
            hello = wire.ClientHello(
                self.next_seq(), wire.PROTOCOL_VERSION, client_name, fingerprint
            )
            self.welcome = self._greet(hello)
        except (OSError, ProtocolError) as error:
            self.close()
            reason = "nobody answers" if isinstance(error, BlockingIOError) else error
            raise StoreUnavailableError(f"no KV cache store on {socket_path}: {reason}") from error
        except BaseException:
            self.close()
            raise

    @property
    def is_lagging(self) -> bool:
        """Whether a request that has timed out is still unanswered."""
        return bool(self._late_seqs)

    def next_seq(self) -> int:
        """A number for the next request."""
        self._last_seq += 1
        return self._last_seq

    def send(self, message: wire.Request) -> None:
        """Send a message without waiting for a reply.

        Raises:
            OSError: The connection is of no use any more.
        """
        try:
            self._sock.sendall(wire.encode(message))
        except BlockingIOError as error:
            # Half a message may be on its way, so nothing can follow it.
            raise ConnectionAbortedError("the store does not read") from error

    def call(self, seq: int, request: wire.Request, reply_type: type[R]) -> R:
        """Send a request and wait for its reply.

        Raises:
            TimeoutError: No reply in time; the channel stays usable.
            OSError: The connection is of no use any more.
            ProtocolError: The reply is not what was asked for; the same.
        """
        self.send(request)
        try:
            while True:
                reply = self._receive()
                if reply.seq == seq:
                    break
                self._take_late(reply)
        except BlockingIOError as error:
            self._late_seqs.append(seq)
            raise TimeoutError("no answer in time") from error
        if not isinstance(reply, reply_type):
            raise ProtocolError(f"{type(reply).__name__} instead of {reply_type.__name__}")
        return reply

    def catch_up(self) -> None:
        """Take late replies that have arrived by now, without waiting.

        Raises:
            OSError: The connection is of no use any more.
            ProtocolError: The same.
        """
        try:
            while self._late_seqs:
                self._take_late(self._receive(socket.MSG_DONTWAIT))
        except BlockingIOError:
            return

    def is_open(self) -> bool:
        """Whether the store still holds its end open, as far as known without waiting."""
        try:
            return bool(self._sock.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT))
        except BlockingIOError:
            return True
        except OSError:
            return False

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()
        self.close_fds()

    def close_fds(self) -> None:
        """Close the file descriptors of pool and board, for instance once they are mapped."""
        while self.fds:
            os.close(self.fds.pop())

    def _take_late(self, reply: wire.Reply) -> None:
        if not self._late_seqs or self._late_seqs.popleft() != reply.seq:
            raise ProtocolError(f"a reply to request {reply.seq}, which was not asked")
        self._on_late(reply)

    def _receive(self, flags: int = 0) -> wire.Reply:
        while not self._arrived:
            data = self._sock.recv(_RECEIVE_BYTES, flags)
            if not data:
                raise ConnectionResetError("the store closed the connection")
            self._arrived.extend(self._reader.feed(data))
        return self._arrived.popleft()

    def _greet(self, hello: wire.ClientHello) -> wire.Welcome:
        self._sock.sendall(wire.encode(hello))
        while not self._arrived:
            data, received_fds, _, _ = socket.recv_fds(self._sock, _RECEIVE_BYTES, _NUM_FDS)
            self.fds += received_fds
            if not data:
                raise ConnectionResetError("the store closed the connection")
            self._arrived.extend(self._reader.feed(data))
        reply = self._arrived.popleft()
        match reply:
            case wire.Welcome() if len(self.fds) == (_NUM_FDS if hello.fingerprint else 0):
                return reply
            case wire.ClientRefused(because_of_fingerprint=True):
                raise FingerprintError(reply.message)
            case wire.ClientRefused():
                raise StoreUnavailableError(reply.message)
        raise ProtocolError(f"{type(reply).__name__} instead of Welcome")


def _set_kernel_timeout(sock: socket.socket, timeout_s: float) -> None:
    """Let blocking calls end with BlockingIOError after ``timeout_s``.

    ``settimeout`` would cost two more system calls for each send and receive.
    """
    whole_s = int(timeout_s)
    timeval = struct.pack("ll", whole_s, max(1, int((timeout_s - whole_s) * 1e6)))
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, timeval)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, timeval)


def _check_owner(sock: socket.socket) -> None:
    # In a folder that all users can write to, anybody may have put a socket of this name.
    peer = peer_of(sock)
    if not is_own(peer):
        raise PermissionError(f"it is run by user {peer.uid}")
