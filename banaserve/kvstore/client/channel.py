"""Connection of a client to the store: requests out, replies in, kept open over restarts.

``StoreChannel`` is one connection; ``StoreLink`` opens a new one after the store was lost.
Both block, neither is thread-safe.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from banaserve.base.errors import FingerprintError, ProtocolError, StoreUnavailableError
from banaserve.base.net.framing import MessageReader
from banaserve.base.platform.linux import is_own, peer_of
from banaserve.kvstore import wire
from banaserve.kvstore.fingerprint import Fingerprint

log = logging.getLogger(__name__)

FIRST_RETRY_S = 0.1
LONGEST_RETRY_S = 5.0
_RECEIVE_BYTES = 64 * 1024
_NUM_FDS = 2
_MAX_UNTOLD = 65536
"""Maximum number of messages kept for a store that is away; beyond it the oldest are dropped."""
R = TypeVar("R", bound=wire.Reply)


class StoreChannel:
    """Connection whose Hello the store has accepted. Not thread-safe.

    A reply that arrives after its request has timed out is passed to ``on_late``, so that the
    slots and leases that it grants can be given back.

    Attributes:
        welcome: The store's answer to Hello.
        fds: File descriptors of pool and board until ``close_fds``; empty without a fingerprint.
    """

    def __init__(
        self,
        socket_path: Path,
        client_name: str,
        fingerprint: Fingerprint | None,
        num_writers: int,
        timeout_s: float,
        on_late: Callable[[wire.Reply], None],
    ) -> None:
        """Connect and greet.

        Raises:
            StoreUnavailableError: Nothing listens on the socket, or no answer arrives in time.
            FingerprintError: The store refuses to share blocks with this client.
        """
        self.fds: list[int] = []
        self._on_late = on_late
        self._late_seqs: deque[int] = deque()
        self._last_seq = 1
        self._reader = MessageReader(wire.REPLIES)
        self._sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            _set_kernel_timeout(self._sock, timeout_s)
            self._sock.connect(str(socket_path))
            _check_owner(self._sock)
            hello = wire.ClientHello(
                self._last_seq, wire.PROTOCOL_VERSION, client_name, fingerprint, num_writers
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
        """Return whether a request that has timed out is still unanswered."""
        return bool(self._late_seqs)

    def send(self, message: wire.Request) -> None:
        """Send a message without waiting for a reply; raise OSError if the connection is broken."""
        try:
            self._sock.sendall(wire.REQUESTS.encode(message))
        except BlockingIOError as error:
            # Half a message may be on its way, so nothing can follow it.
            raise ConnectionAbortedError("the store does not read") from error

    def call(self, build: Callable[[int], wire.Request], reply_type: type[R]) -> R:
        """Send the request that ``build`` makes from its seq, and wait for its reply.

        Raises:
            TimeoutError: No reply arrived in time; the channel stays usable.
            OSError: The connection is no longer usable.
            ProtocolError: The reply is of an unexpected type; the connection is no longer usable.
        """
        self._last_seq += 1
        seq = self._last_seq
        self.send(build(seq))
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
        """Process the late replies that have arrived by now, without waiting.

        Raises:
            OSError: The connection is no longer usable; ProtocolError likewise.
        """
        try:
            while self._late_seqs:
                self._take_late(self._receive(socket.MSG_DONTWAIT))
        except BlockingIOError:
            return

    def is_open(self) -> bool:
        """Return whether the store still holds its end open, as far as known without waiting."""
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
        """Close the file descriptors of pool and board, for instance once both are mapped."""
        while self.fds:
            os.close(self.fds.pop())

    def _take_late(self, reply: wire.Reply) -> None:
        if not self._late_seqs or self._late_seqs.popleft() != reply.seq:
            raise ProtocolError(f"a reply to request {reply.seq}, which was not asked")
        self._on_late(reply)

    def _receive(self, flags: int = 0) -> wire.Reply:
        while (reply := self._reader.take()) is None:
            data = self._sock.recv(_RECEIVE_BYTES, flags)
            if not data:
                raise ConnectionResetError("the store closed the connection")
            self._reader.feed(data)
        return reply

    def _greet(self, hello: wire.ClientHello) -> wire.Welcome:
        self._sock.sendall(wire.REQUESTS.encode(hello))
        while (reply := self._reader.take()) is None:
            data, received_fds, _, _ = socket.recv_fds(self._sock, _RECEIVE_BYTES, _NUM_FDS)
            self.fds += received_fds
            if not data:
                raise ConnectionResetError("the store closed the connection")
            self._reader.feed(data)
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
    # In a folder that all users can write to, any user may have created a socket of this name.
    peer = peer_of(sock)
    if not is_own(peer):
        raise PermissionError(f"it is run by user {peer.uid}")


class StoreLink:
    """Calls to the store that fail at once while it is unavailable. Not thread-safe.

    Args:
        connect: Function that returns a new channel with the given ``on_late``.
        on_open: Callback after each greeting, with the welcome and the file descriptors of pool
            and board, which are closed afterwards.
        on_lost: Callback when the connection to the store is lost.
    """

    def __init__(
        self,
        connect: Callable[[Callable[[wire.Reply], None]], StoreChannel],
        *,
        on_open: Callable[[wire.Welcome, int, int], None],
        on_lost: Callable[[], None],
    ) -> None:
        self.generation = 0
        self._connect = connect
        self._on_open = on_open
        self._on_lost = on_lost
        self._channel: StoreChannel | None = None
        self._pid = os.getpid()
        # Messages that could not be sent yet: without them the store would keep slots in use that
        # no client needs.
        self._untold: deque[wire.OneWay] = deque(maxlen=_MAX_UNTOLD)
        self._retry_at_s = 0.0
        self._retry_pause_s = FIRST_RETRY_S
        self._was_greeted = False
        self._is_away = False
        self._is_closed = False

    def open(self) -> None:
        """Connect now, unless connected.

        Raises:
            StoreUnavailableError: The store does not answer, or this link is closed.
            FingerprintError: The store refuses to share blocks with this client.
        """
        if self._is_closed:
            raise StoreUnavailableError("this client is closed")
        self._forget_parents_channel()
        if self._channel is not None:
            return
        channel = self._connect(self._on_late)
        try:
            self._on_open(channel.welcome, *channel.fds)
        except (OSError, ValueError) as error:
            channel.close()
            raise StoreUnavailableError(f"cannot map the store's pool: {error}") from error
        channel.close_fds()
        self._channel = channel
        if channel.welcome.generation != self.generation:
            self._untold.clear()
        self.generation = channel.welcome.generation
        self._was_greeted = True
        self._note_present()

    def call(self, build: Callable[[int], wire.Request], reply_type: type[R]) -> R | None:
        """Send the request that ``build`` makes from its seq and return the reply; None while away.

        Raises:
            FingerprintError: At the first connection only.
        """
        # The second attempt is for a store that was restarted since the last call.
        for _ in range(2):
            channel = self._present_channel()
            if channel is None:
                return None
            try:
                self._tell_untold(channel)
                return channel.call(build, reply_type)
            except TimeoutError:
                self._note_away("it does not answer in time")
                return None
            except (OSError, ProtocolError) as error:
                self._lose(error)
        self._note_away("it closes its connections")
        return None

    def tell(self, message: wire.OneWay) -> None:
        """Send a message now if the store is connected, else before the next call."""
        if message.generation != self.generation:
            return
        self._untold.append(message)
        if self._channel is None or self._channel.is_lagging:
            return
        try:
            self._tell_untold(self._channel)
        except (OSError, ProtocolError) as error:
            self._lose(error)

    def is_lost(self) -> bool:
        """Return whether the store is known to be gone, without asking it."""
        return self._channel is None or not self._channel.is_open()

    def refresh(self) -> None:
        """Reconnect if the store has closed the connection; raises as ``call`` does."""
        self.note_if_lost()
        self._present_channel()

    def note_if_lost(self) -> None:
        """Drop the connection if the store has closed it; do not reconnect."""
        if self._channel is not None and not self._channel.is_open():
            self._lose(ConnectionResetError("the store closed the connection"))

    def close(self) -> None:
        """Send Goodbye and disconnect for good."""
        self._forget_parents_channel()
        self._is_closed = True
        if self._channel is None:
            return
        try:
            self._tell_untold(self._channel)
            self._channel.send(wire.Goodbye())
        except (OSError, ProtocolError) as error:
            log.warning("left the KV cache store without goodbye: %s", error)
        self._channel.close()
        self._channel = None

    def _present_channel(self) -> StoreChannel | None:
        self._forget_parents_channel()
        channel = self._channel
        if channel is not None and not channel.is_lagging:
            return channel
        if self._is_closed or time.monotonic() < self._retry_at_s:
            return None
        return self._reopened() if channel is None else self._caught_up(channel)

    def _reopened(self) -> StoreChannel | None:
        try:
            self.open()
        except StoreUnavailableError as error:
            self._note_away(str(error))
        except FingerprintError as error:
            if not self._was_greeted:
                raise
            self._note_away(str(error))
        return self._channel

    def _caught_up(self, channel: StoreChannel) -> StoreChannel | None:
        try:
            channel.catch_up()
        except (OSError, ProtocolError) as error:
            self._lose(error)
            return self._reopened()
        if channel.is_lagging:
            self._note_away("it does not answer in time")
            return None
        self._note_present()
        return channel

    def _on_late(self, reply: wire.Reply) -> None:
        """Give back the lease, hold and slots that a late reply grants."""
        if not isinstance(reply, wire.SlotsGranted):
            return
        if reply.lease_id is not None:
            self._untold.append(wire.ReleaseLeases(self.generation, reply.lease_id))
        if reply.hold:
            self._untold.append(wire.EndHold(self.generation, reply.hold))
        serials = [pair[1] for pair in reply.reserved if pair is not None]
        if serials:
            self._untold.append(wire.Abandon(self.generation, serials, None))

    def _tell_untold(self, channel: StoreChannel) -> None:
        while self._untold:
            channel.send(self._untold[0])
            self._untold.popleft()

    def _lose(self, error: Exception) -> None:
        log.info("lost the KV cache store: %s", error)
        if self._channel is not None:
            self._channel.close()
        self._channel = None
        self._on_lost()

    def _forget_parents_channel(self) -> None:
        """Close the connection inherited by a fork: two processes must not use the parent's."""
        if self._pid == os.getpid():
            return
        self._pid = os.getpid()
        self._untold.clear()
        if self._channel is not None:
            self._channel.close()
            self._channel = None

    def _note_away(self, reason: str) -> None:
        if not self._is_away:
            log.warning("going on without the KV cache store: %s", reason)
            self._is_away = True
            self._retry_pause_s = FIRST_RETRY_S
        self._retry_at_s = time.monotonic() + self._retry_pause_s
        self._retry_pause_s = min(2 * self._retry_pause_s, LONGEST_RETRY_S)

    def _note_present(self) -> None:
        if self._is_away:
            log.warning("the KV cache store is back")
        self._is_away = False
        self._retry_at_s = 0.0
