"""Messages over a byte stream: numbered, with an epoch, and signed on TCP."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence

import numpy as np

from banaserve.base.errors import ProtocolError
from banaserve.base.net.framing import LENGTH_BYTES
from banaserve.transport.channels import frames
from banaserve.transport.channels.authentication import CODE_BYTES, FrameCode, Seal
from banaserve.transport.channels.stream import SocketStream
from banaserve.transport.errors import (
    PeerGoneError,
    RefusedError,
    StaleEpochError,
    TransferTimeoutError,
)
from banaserve.transport.interface import Bytes, Message, Tensor

MAX_KEPT = 1024
_NO_BYTES: Bytes = np.empty(0, np.uint8)
_CHECKED_BYTES = 1 << 18
"""Number of bytes that are received and then checked while they are in the cache."""


Place = Callable[[frames.FrameHeader, Sequence[int]], Sequence[Bytes]]
"""Function that returns memory for a frame's first tensors, by the frame's header and the tensors'
sizes; a tensor is received into its memory if the size is the same."""


class StreamChannel:
    """Channel for ordered messages between two processes.

    One thread receives or calls at a time; any other may send meanwhile. A message whose epoch is
    below ``min_epoch`` is not delivered: a request of this kind is answered with StaleEpochError,
    others are counted in ``num_refused``, as are duplicates and late replies.

    Args:
        stream: Stream connected to an authenticated peer; the channel owns it.
        seal: Seal that signs and checks frames; None if the kernel authenticates the peer.
    """

    def __init__(self, stream: SocketStream, seal: Seal | None = None) -> None:
        self.min_epoch = 0
        self._stream = stream
        self._seal = seal
        self._sending = threading.Lock()
        self._last_sent = self._last_received = 0
        self.num_refused = 0
        self._kept: deque[Message] = deque()
        self._broken: str | None = None

    def fileno(self) -> int:
        """Return a file descriptor, readable when something has arrived or the peer is gone."""
        return self._stream.fileno()

    def has_pending(self) -> bool:
        """Return whether arrived bytes or messages were already read from ``fileno``."""
        return bool(self._kept or self._stream.num_buffered())

    def check_peer(self) -> None:
        """Raise PeerGoneError if the peer is gone; for times at which the peer sends nothing."""
        self._stream.check_peer()

    def send(self, message: Message, timeout_s: float) -> None:
        """Send a one-way message.

        Raises:
            RefusedError: The message is too large or not well-formed; nothing was sent.
            TransferTimeoutError: The peer does not read. The channel is closed.
            PeerGoneError: The peer has died or closed the connection.
        """
        self._write(message, frames.ONE_WAY, 0, time.monotonic() + timeout_s)

    def call(self, message: Message, timeout_s: float, into: Sequence[Bytes] = ()) -> Message:
        """Send a request and wait for its reply. Messages that arrive before it are kept.

        Args:
            into: Memory for the reply's first tensors; each tensor is received into its memory if
                the size is the same. After an error the content is undefined.

        Raises:
            RefusedError: The message is refused, see ``send``; StaleEpochError if the peer's epoch
                is higher.
            TransferTimeoutError: No reply arrived in time. The channel stays usable; the late reply
                is dropped and counted.
            PeerGoneError: The peer has died or closed the connection.
        """
        deadline = time.monotonic() + timeout_s
        token = self._write(message, frames.REQUEST, 0, deadline)

        def place(header: frames.FrameHeader, sizes: Sequence[int]) -> Sequence[Bytes]:
            return into if header.kind == frames.REPLY and header.token == token else ()

        while True:
            header, answer = self._next_frame(deadline, place)
            if header.kind in (frames.ONE_WAY, frames.REQUEST):
                self._keep(header, answer, deadline)
            elif header.token != token:
                self.num_refused += 1
            elif header.kind == frames.REFUSAL:
                raise StaleEpochError(f"the peer is at epoch {header.epoch}, not {message.epoch}")
            elif header.epoch < self.min_epoch:
                raise StaleEpochError(f"the reply is of epoch {header.epoch}: it comes too late")
            else:
                return answer

    def receive(
        self,
        timeout_s: float,
        place: Callable[[bytes, Sequence[int]], Sequence[Bytes]] | None = None,
    ) -> Message:
        """Return the next request or one-way message.

        Args:
            place: Function that returns memory for the first tensors, like ``into`` of ``call``, by
                the message's body and the tensors' sizes. These are not checked yet: the memory
                must not be used for anything else until the message is returned.

        Raises:
            TransferTimeoutError: Nothing arrived in time; the channel stays usable.
            PeerGoneError: The peer has died, closed the connection, or broken the protocol.
        """
        deadline = time.monotonic() + timeout_s

        def place_of(header: frames.FrameHeader, sizes: Sequence[int]) -> Sequence[Bytes]:
            if place is None or header.kind not in (frames.ONE_WAY, frames.REQUEST):
                return ()
            return place(header.body, sizes)

        while not self._kept:
            header, message = self._next_frame(deadline, place_of)
            if header.kind in (frames.ONE_WAY, frames.REQUEST):
                self._keep(header, message, deadline)
            else:
                self.num_refused += 1
        return self._kept.popleft()

    def reply(self, request: Message, answer: Message, timeout_s: float) -> None:
        """Answer a request that was received.

        Raises:
            RefusedError: ``request`` is not a request, or ``answer`` is too large.
            TransferTimeoutError: The peer does not read. The channel is closed.
            PeerGoneError: The peer has died or closed the connection.
        """
        if not request.token:
            raise RefusedError("a one-way message cannot be answered")
        self._write(answer, frames.REPLY, request.token, time.monotonic() + timeout_s)

    def abort(self) -> None:
        """Make threads that wait on this channel fail, from any thread; ``close`` is needed too."""
        self._stream.abort()

    def close(self) -> None:
        """Close the connection; the peer notices at once."""
        self._broken = self._broken or "the channel is closed"
        self._stream.close()

    def _keep(self, header: frames.FrameHeader, message: Message, deadline: float) -> None:
        if header.epoch < self.min_epoch:
            self.num_refused += 1
            if header.kind == frames.REQUEST:
                refusal = Message(b"", epoch=self.min_epoch)
                self._write(refusal, frames.REFUSAL, header.seq, deadline)
        elif len(self._kept) == MAX_KEPT:
            raise self._break(f"{MAX_KEPT} messages came before the reply")
        else:
            self._kept.append(message)

    def _write(self, message: Message, kind: int, token: int, deadline: float) -> int:
        with self._sending:
            self._check_open()
            seq = self._last_sent + 1
            parts = frames.encode(message, seq, kind, token)
            self._last_sent = seq
            try:
                if self._seal is not None:
                    parts.append(self._seal.sign(parts))
                self._stream.write(parts, deadline)
            except (PeerGoneError, TransferTimeoutError) as error:
                self._break(str(error))
                raise
            return seq

    def _next_frame(self, deadline: float, place: Place) -> tuple[frames.FrameHeader, Message]:
        while True:
            self._check_open()
            self._stream_wait(deadline)
            try:
                header, tensors = self._read_frame(deadline, place)
            except (ProtocolError, PeerGoneError) as error:
                raise self._break(str(error)) from None
            if header.seq <= self._last_received:
                self.num_refused += 1
                continue
            if header.seq > self._last_received + 1:
                raise self._break(f"message {self._last_received + 1} is missing")
            self._last_received = header.seq
            token = header.seq if header.kind == frames.REQUEST else 0
            return header, Message(header.body, tensors, header.epoch, token)

    def _stream_wait(self, deadline: float) -> None:
        try:
            self._stream.wait_readable(deadline)
        except PeerGoneError as error:
            raise self._break(str(error)) from None

    def _read_frame(
        self, deadline: float, place: Place
    ) -> tuple[frames.FrameHeader, tuple[Tensor, ...]]:
        code = self._seal.next_received() if self._seal is not None else None
        length = self._read(LENGTH_BYTES, deadline, code)
        header = frames.HEADERS.decode(self._read(frames.HEADERS.length_of(length), deadline, code))
        sizes = frames.tensor_sizes(header)
        buffers = _buffers(sizes, place(header, sizes))
        self._read_parts([frames.view_of(buffer) for buffer in buffers], deadline, code)
        if self._seal is not None and code is not None:
            theirs = bytearray(CODE_BYTES)
            self._stream.read_into(memoryview(theirs), deadline)
            if not self._seal.accept(code, bytes(theirs)):
                raise ProtocolError("a frame has a wrong code")
        tensors = tuple(
            Tensor(dtype, shape, buffer)
            for (dtype, shape), buffer in zip(header.tensors, buffers, strict=True)
        )
        return header, tensors

    def _read(self, num_bytes: int, deadline: float, code: FrameCode | None) -> bytearray:
        target = bytearray(num_bytes)
        self._stream.read_into(memoryview(target), deadline)
        if code is not None:
            code.add(target)
        return target

    def _read_parts(
        self, targets: Sequence[memoryview], deadline: float, code: FrameCode | None
    ) -> None:
        if code is None:
            self._stream.read_parts(targets, deadline)
            return
        for some in _portions(targets):
            self._stream.read_parts(some, deadline)
            for part in some:
                code.add(part)

    def _check_open(self) -> None:
        if self._broken is not None:
            raise PeerGoneError(self._broken)

    def _break(self, reason: str) -> PeerGoneError:
        self._broken = self._broken or reason
        self._stream.close()
        return PeerGoneError(self._broken)


def _portions(targets: Sequence[memoryview]) -> Iterator[list[memoryview]]:
    """Yield the same memory in order, at most ``_CHECKED_BYTES`` at a time."""
    portion: list[memoryview] = []
    room = _CHECKED_BYTES
    for target in targets:
        for first in range(0, target.nbytes, _CHECKED_BYTES):
            part = target[first : first + _CHECKED_BYTES]
            if part.nbytes > room:
                yield portion
                portion, room = [], _CHECKED_BYTES
            portion.append(part)
            room -= part.nbytes
    if portion:
        yield portion


def _buffers(sizes: Sequence[int], given: Sequence[Bytes]) -> list[Bytes]:
    """Return memory for a frame's tensors: the given memory if its size fits, else new memory."""
    offered = [*given, *[_NO_BYTES] * (len(sizes) - len(given))]
    return [
        target if size and target.nbytes == size else np.empty(size, np.uint8)
        for target, size in zip(offered, sizes, strict=False)
    ]
