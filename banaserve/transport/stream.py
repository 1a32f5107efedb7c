"""Byte stream over a connected socket: a deadline on every wait, and notice of a dead peer."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

from banaserve.platform.linux import open_peer_pidfd
from banaserve.transport.errors import PeerGoneError, TransferTimeoutError

# Of a peer that has begun a message and sends nothing more, while no caller waits that long.
STALL_S = 1.0
_BUFFER_BYTES = 16 * 1024
"""Received at once where little is wanted. What comes behind a head is copied out of it again, so
it is no larger than small messages need."""
_DIRECT_BYTES = 4 * 1024
"""As much and more is received where it belongs: a call costs what copying so much does."""
_MAX_PARTS = 512


class ByteStream(Protocol):
    """What a channel writes to and reads from; all deadlines are of ``time.monotonic``."""

    def fileno(self) -> int: ...

    def num_buffered(self) -> int: ...

    def write(self, parts: Sequence[memoryview | bytes], deadline: float) -> None: ...

    def read_into(self, target: memoryview, deadline: float) -> None: ...

    def read_parts(self, targets: Sequence[memoryview], deadline: float) -> None: ...

    def wait_readable(self, deadline: float) -> None: ...

    def close(self) -> None: ...


class SocketStream:
    """A byte stream over a stream socket, which it owns. One reader and one writer at a time."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._first = self._end = 0
        self._pidfd = -1
        # Held in calls on the socket, none of which waits: a socket closed under one gives its
        # number to whatever is opened next.
        self._reading, self._writing = threading.Lock(), threading.Lock()
        self._readable, self._writable = select.poll(), select.poll()
        self._readable.register(sock, select.POLLIN)
        self._writable.register(sock, select.POLLOUT)
        if sock.family == socket.AF_UNIX:
            self._watch_process()
        else:
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def fileno(self) -> int:
        return self._sock.fileno()

    def num_buffered(self) -> int:
        """Bytes that were received and not read yet."""
        return self._end - self._first

    def write(self, parts: Sequence[memoryview | bytes], deadline: float) -> None:
        """Send all parts.

        Raises:
            TransferTimeoutError: The peer does not read; the stream is of no use any more.
            PeerGoneError: The peer has gone.
        """
        left = [view for part in parts if (view := memoryview(part)).nbytes]
        while left:
            try:
                with self._writing:
                    sent = self._sock.sendmsg(left[:_MAX_PARTS])
            except BlockingIOError:
                self._wait(self._writable, deadline)
                continue
            except OSError as error:
                raise PeerGoneError(f"the peer has closed the connection: {error}") from None
            _advance(left, sent)

    def read_into(self, target: memoryview, deadline: float) -> None:
        """Fill ``target``. Past the deadline it goes on as long as bytes keep coming.

        Raises:
            PeerGoneError: The peer has gone, or stands still.
        """
        self.read_parts((target,), deadline)

    def read_parts(self, targets: Sequence[memoryview], deadline: float) -> None:
        """As ``read_into`` for each of ``targets`` in turn, in as few calls of the kernel."""
        left = [target for target in targets if target.nbytes]
        missing = sum(target.nbytes for target in left)
        while left:
            if self._first < self._end:
                count = min(left[0].nbytes, self._end - self._first)
                left[0][:count] = self._view[self._first : self._first + count]
                self._first += count
            elif missing >= _DIRECT_BYTES:
                count = self._receive(left[:_MAX_PARTS], deadline)
            else:
                self._fill(deadline)
                continue
            missing -= count
            _advance(left, count)

    def wait_readable(self, deadline: float) -> None:
        """Return when at least one byte can be read without waiting.

        Raises:
            TransferTimeoutError: Nothing has come in time.
            PeerGoneError: The peer has gone.
        """
        if self._first == self._end:
            # Asking again for some microseconds before the wait makes round trips twice as long
            # where the cores are busy: the peer needs them.
            while not (count := self._receive_now([self._view])):
                self._wait(self._readable, deadline)
            self._first, self._end = 0, count

    def check_peer(self) -> None:
        """Raise where the peer has gone; meant for moments at which it says nothing.

        Raises:
            PeerGoneError: It has.
        """
        if not self.num_buffered() and self._readable.poll(0):
            self._end = self._receive_now([self._view])
            self._first = 0
            if not self._end:
                raise PeerGoneError("the peer's process has died")

    def abort(self) -> None:
        """Make threads that wait on this stream fail, from any thread; ``close`` is still due."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Any thread may, and several at once: a reader and a writer both find it broken."""
        self.abort()
        with self._reading, self._writing:
            self._sock.close()
            pidfd, self._pidfd = self._pidfd, -1
            if pidfd >= 0:
                os.close(pidfd)

    def _watch_process(self) -> None:
        # Where the process cannot be named, the end of the connection has to do.
        with suppress(OSError):
            self._pidfd = open_peer_pidfd(self._sock)
            for poll in (self._readable, self._writable):
                poll.register(self._pidfd, select.POLLIN)

    def _fill(self, deadline: float) -> None:
        self._end = self._receive([self._view], deadline)
        self._first = 0

    def _receive(self, targets: list[memoryview], deadline: float) -> int:
        deadline = max(deadline, time.monotonic() + STALL_S)
        while not (count := self._receive_now(targets)):
            try:
                self._wait(self._readable, deadline)
            except TransferTimeoutError:
                raise PeerGoneError("the peer stands still in the middle of a message") from None
        return count

    def _receive_now(self, targets: list[memoryview]) -> int:
        try:
            with self._reading:
                count: int = self._sock.recvmsg_into(targets)[0]
        except BlockingIOError:
            return 0
        except (OSError, ValueError) as error:
            raise PeerGoneError(f"the connection is broken: {error}") from None
        if not count:
            raise PeerGoneError("the peer has closed the connection")
        return count

    def _wait(self, poll: select.poll, deadline: float) -> None:
        events = poll.poll(max(0.0, deadline - time.monotonic()) * 1000.0)
        if not events:
            raise TransferTimeoutError("the peer has not answered in time")
        # Bytes that a dead process has sent before are still read.
        if len(events) == 1 and events[0][0] == self._pidfd:
            raise PeerGoneError("the peer's process has died")
        if any(event & select.POLLNVAL for _, event in events):
            raise PeerGoneError("the connection is closed")


def _advance(left: list[memoryview], num_bytes: int) -> None:
    """Take so many bytes off the front of ``left``."""
    num_whole = 0
    while num_whole < len(left) and num_bytes >= left[num_whole].nbytes:
        num_bytes -= left[num_whole].nbytes
        num_whole += 1
    del left[:num_whole]
    if num_bytes:
        left[0] = left[0][num_bytes:]


class PeerWatch:
    """Watches a connection on which the peer says nothing more, and the peer's process.

    Args:
        sock: Connected; closed by ``close``.
    """

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._poll = select.poll()
        self._poll.register(sock, select.POLLIN | select.POLLRDHUP)
        self._pidfd = -1
        if sock.family == socket.AF_UNIX:
            with suppress(OSError):
                self._pidfd = open_peer_pidfd(sock)
                self._poll.register(self._pidfd, select.POLLIN)

    def check(self) -> None:
        """Raise where the peer has gone.

        Raises:
            PeerGoneError: It has died or closed the connection.
        """
        if self._poll.poll(0):
            raise PeerGoneError("the peer has died or closed its transport")

    def close(self) -> None:
        """Close the connection."""
        self._sock.close()
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1
