"""Byte stream over a connected socket: a deadline on every wait, and detection of a dead peer."""

from __future__ import annotations

import os
import select
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from banaserve.base.clock import wait_parts
from banaserve.base.platform.linux import open_peer_pidfd
from banaserve.transport.errors import PeerGoneError, TransferTimeoutError

# Minimum wait for the rest of a message that the peer has begun, even after the caller's deadline.
STALL_S = 1.0
_BUFFER_BYTES = 16 * 1024
"""Size of the buffer, used for small reads. Bytes after a header are copied out of it again, so it
is no larger than small messages need."""
_DIRECT_BYTES = 4 * 1024
"""Minimum size that is received directly into its target: a call costs as much as copying this
number of bytes."""
_MAX_PARTS = 512


class SocketStream:
    """Byte stream over a stream socket, which it owns. One reader and one writer at a time.

    All deadlines are times of ``time.monotonic``.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._buffer = bytearray(_BUFFER_BYTES)
        self._view = memoryview(self._buffer)
        self._first = self._end = 0
        self._pidfd = -1
        # Held during calls on the socket, none of which waits: if the socket were closed during a
        # call, its number could already belong to a newly opened file.
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
        """Return the number of bytes that were received but not read yet."""
        return self._end - self._first

    def write(self, parts: Sequence[memoryview | bytes], deadline: float) -> None:
        """Send all parts.

        Raises:
            TransferTimeoutError: The peer does not read; the stream is no longer usable.
            PeerGoneError: The peer is gone.
        """
        left = [view for part in parts if (view := memoryview(part)).nbytes]
        while left:
            try:
                with self._writing:
                    sent = self._sock.sendmsg(left[:_MAX_PARTS])
            except BlockingIOError:
                deadline += self._wait(self._writable, deadline)
                continue
            except OSError as error:
                raise PeerGoneError(f"the peer has closed the connection: {error}") from None
            _advance(left, sent)

    def read_into(self, target: memoryview, deadline: float) -> None:
        """Fill ``target``; continue after the deadline as long as bytes arrive.

        Raises:
            PeerGoneError: The peer is gone, or hangs.
        """
        self.read_parts((target,), deadline)

    def read_parts(self, targets: Sequence[memoryview], deadline: float) -> None:
        """Fill each of ``targets`` in turn like ``read_into``, with few system calls."""
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
        """Wait until at least one byte can be read without waiting.

        Raises:
            TransferTimeoutError: Nothing has arrived in time.
            PeerGoneError: The peer is gone.
        """
        if self._first == self._end:
            # No busy polling before the wait: a few microseconds of it double the round trips if
            # the cores are busy, because the peer needs them.
            while not (count := self._receive_now([self._view])):
                self._wait(self._readable, deadline)
            self._first, self._end = 0, count

    def check_peer(self) -> None:
        """Raise PeerGoneError if the peer is gone; for times at which the peer sends nothing."""
        if not self.num_buffered() and self._readable.poll(0):
            self._end = self._receive_now([self._view])
            self._first = 0
            if not self._end:
                raise PeerGoneError("the peer's process has died")

    def abort(self) -> None:
        """Make threads that wait on this stream fail, from any thread; ``close`` is needed too."""
        with suppress(OSError):
            self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Close the stream. Several threads may call this at once, such as reader and writer."""
        self.abort()
        with self._reading, self._writing:
            self._sock.close()
            pidfd, self._pidfd = self._pidfd, -1
            if pidfd >= 0:
                os.close(pidfd)

    def _watch_process(self) -> None:
        # If the peer's process cannot be watched, only the end of the connection shows its death.
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

    def _wait(self, poll: select.poll, deadline: float) -> float:
        """Wait for an event; return the time for which this process stood still, in seconds."""
        late_s = 0.0
        began_s = time.monotonic()
        for part_s in wait_parts(deadline - began_s):
            events = poll.poll(part_s * 1000.0)
            ended_s = time.monotonic()
            late_s += max(0.0, ended_s - began_s - part_s)
            began_s = ended_s
            if events:
                break
        else:
            raise TransferTimeoutError("the peer has not answered in time")
        # Bytes that a process sent before its death are still read.
        if len(events) == 1 and events[0][0] == self._pidfd:
            raise PeerGoneError("the peer's process has died")
        if any(event & select.POLLNVAL for _, event in events):
            raise PeerGoneError("the connection is closed")
        return late_s


def _advance(left: list[memoryview], num_bytes: int) -> None:
    """Remove ``num_bytes`` from the front of ``left``."""
    num_whole = 0
    while num_whole < len(left) and num_bytes >= left[num_whole].nbytes:
        num_bytes -= left[num_whole].nbytes
        num_whole += 1
    del left[:num_whole]
    if num_bytes:
        left[0] = left[0][num_bytes:]
