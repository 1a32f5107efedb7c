"""One client's connection, seen from the daemon: bytes in, messages out, never blocking."""

from __future__ import annotations

import selectors
import socket
from collections.abc import Iterator, Sequence

from banaserve.errors import ProtocolError
from banaserve.kvstore import wire

_RECEIVE_BYTES = 64 * 1024
_MAX_UNSENT_BYTES = 2 * wire.MAX_MESSAGE_BYTES


class Connection:
    """A connected socket with what is not yet read as a message or not yet sent.

    Attributes:
        id: Never used again within one daemon.
        pidfd: Of the client's process. ``close`` leaves it open.
        awaited_events: What the selector waits for on the socket.
        closed: Events of this connection that are still under way must be ignored.
    """

    def __init__(self, connection_id: int, sock: socket.socket, pidfd: int) -> None:
        sock.setblocking(False)
        self.id = connection_id
        self.sock = sock
        self.pidfd = pidfd
        self.awaited_events = selectors.EVENT_READ
        self.closed = False
        self._reader: wire.FrameReader[wire.Request] = wire.FrameReader(wire.Request)
        self._unsent = bytearray()

    @property
    def wanted_events(self) -> int:
        """What to wait for: until a client reads its replies, no more of its requests are read."""
        return selectors.EVENT_WRITE if self._unsent else selectors.EVENT_READ

    def receive(self) -> Iterator[wire.Request]:
        """Yield the messages that have arrived.

        Raises:
            EOFError: The client has closed its end.
            OSError: The connection is broken.
            ProtocolError: The bytes are no messages.
        """
        try:
            data = self.sock.recv(_RECEIVE_BYTES)
        except BlockingIOError:
            return
        if not data:
            raise EOFError
        yield from self._reader.feed(data)

    def send(self, reply: wire.Reply, fds: Sequence[int] = ()) -> None:
        """Send or queue a reply, with copies of ``fds`` attached to its first byte.

        Raises:
            OSError: The connection is broken.
            ProtocolError: The client does not read its replies.
        """
        frame = wire.encode(reply)
        num_sent = 0
        if not self._unsent:
            try:
                if fds:
                    num_sent = socket.send_fds(self.sock, [frame], fds)
                else:
                    num_sent = self.sock.send(frame)
            except BlockingIOError:
                if fds:
                    raise
        elif fds:
            raise ProtocolError("a Hello after other requests")
        self._unsent += frame[num_sent:]
        if len(self._unsent) > _MAX_UNSENT_BYTES:
            raise ProtocolError(f"{len(self._unsent)} bytes of replies were not read")

    def flush(self) -> None:
        """Send what the socket takes now.

        Raises:
            OSError: The connection is broken.
        """
        del self._unsent[: self.sock.send(self._unsent)]

    def close(self) -> None:
        """Close the socket."""
        self.closed = True
        self.sock.close()
