"""Messages over a byte stream: numbered, tied to an epoch, and on TCP signed."""

from __future__ import annotations

import threading
import time
from collections import deque

import numpy as np

from banaserve.errors import ProtocolError
from banaserve.transport import frames
from banaserve.transport.errors import (
    PeerGoneError,
    RefusedError,
    StaleEpochError,
    TransferTimeoutError,
)
from banaserve.transport.frames import ONE_WAY, PREFIX, REFUSAL, REPLY, REQUEST, FrameHeader
from banaserve.transport.interface import Message, Tensor
from banaserve.transport.seal import CODE_BYTES, Seal
from banaserve.transport.stream import ByteStream

MAX_KEPT = 1024


class StreamChannel:
    """A ``Channel`` over ``stream``. Any thread may send while one other receives.

    Args:
        stream: Connected to the peer, which is who it should be; owned.
        seal: Signs and checks frames; None where the kernel vouches for the peer.
    """

    def __init__(self, stream: ByteStream, seal: Seal | None = None) -> None:
        self.min_epoch = 0
        self._stream = stream
        self._seal = seal
        self._sending = threading.Lock()
        self._last_sent = self._last_received = 0
        self._num_refused = 0
        self._kept: deque[Message] = deque()
        self._broken: str | None = None

    @property
    def num_refused(self) -> int:
        return self._num_refused

    def fileno(self) -> int:
        return self._stream.fileno()

    def has_pending(self) -> bool:
        return bool(self._kept or self._stream.num_buffered())

    def send(self, message: Message, timeout_s: float) -> None:
        self._write(message, ONE_WAY, 0, time.monotonic() + timeout_s)

    def call(self, message: Message, timeout_s: float) -> Message:
        deadline = time.monotonic() + timeout_s
        token = self._write(message, REQUEST, 0, deadline)
        while True:
            header, answer = self._next_frame(deadline)
            if header.kind in (ONE_WAY, REQUEST):
                self._keep(header, answer, deadline)
            elif header.token != token:
                self._num_refused += 1
            elif header.kind == REFUSAL:
                raise StaleEpochError(f"the peer is at epoch {header.epoch}, not {message.epoch}")
            elif header.epoch < self.min_epoch:
                raise StaleEpochError(f"the reply is of epoch {header.epoch}: it comes too late")
            else:
                return answer

    def receive(self, timeout_s: float) -> Message:
        deadline = time.monotonic() + timeout_s
        while not self._kept:
            header, message = self._next_frame(deadline)
            if header.kind in (ONE_WAY, REQUEST):
                self._keep(header, message, deadline)
            else:
                self._num_refused += 1
        return self._kept.popleft()

    def reply(self, request: Message, answer: Message, timeout_s: float) -> None:
        if not request.token:
            raise RefusedError("a one-way message cannot be answered")
        self._write(answer, REPLY, request.token, time.monotonic() + timeout_s)

    def close(self) -> None:
        self._broken = self._broken or "the channel is closed"
        self._stream.close()

    def _keep(self, header: FrameHeader, message: Message, deadline: float) -> None:
        if header.epoch < self.min_epoch:
            self._num_refused += 1
            if header.kind == REQUEST:
                refusal = Message(b"", epoch=self.min_epoch)
                self._write(refusal, REFUSAL, header.seq, deadline)
        elif len(self._kept) == MAX_KEPT:
            raise self._break(f"{MAX_KEPT} messages came before the reply")
        else:
            self._kept.append(message)

    def _write(self, message: Message, kind: int, token: int, deadline: float) -> int:
        with self._sending:
            self._check_open()
            seq = self._last_sent + 1
            parts = frames.encode(message, seq, kind, token)
            if self._seal is not None:
                parts.append(self._seal.sign(parts))
            self._last_sent = seq
            try:
                self._stream.write(parts, deadline)
            except (PeerGoneError, TransferTimeoutError) as error:
                self._break(str(error))
                raise
            return seq

    def _next_frame(self, deadline: float) -> tuple[FrameHeader, Message]:
        while True:
            self._check_open()
            self._stream_wait(deadline)
            try:
                header, tensors = self._read_frame(deadline)
            except (ProtocolError, PeerGoneError) as error:
                raise self._break(str(error)) from None
            if header.seq <= self._last_received:
                self._num_refused += 1
                continue
            if header.seq > self._last_received + 1:
                raise self._break(f"message {self._last_received + 1} is missing")
            self._last_received = header.seq
            token = header.seq if header.kind == REQUEST else 0
            return header, Message(header.body, tensors, header.epoch, token)

    def _stream_wait(self, deadline: float) -> None:
        try:
            self._stream.wait_readable(deadline)
        except PeerGoneError as error:
            raise self._break(str(error)) from None

    def _read_frame(self, deadline: float) -> tuple[FrameHeader, tuple[Tensor, ...]]:
        prefix = self._read(PREFIX.size, deadline)
        header_bytes, payload_bytes = PREFIX.unpack(prefix)
        frames.check_lengths(header_bytes, payload_bytes)
        encoded = self._read(header_bytes, deadline)
        header = frames.decode(encoded)
        sizes = frames.tensor_sizes(header)
        if sum(sizes) != payload_bytes:
            raise ProtocolError(f"tensors of {sum(sizes)} bytes in a payload of {payload_bytes}")
        buffers = [np.empty(size, np.uint8) for size in sizes]
        for buffer in buffers:
            self._stream.read_into(frames.view_of(buffer), deadline)
        if self._seal is not None:
            code = bytes(self._read(CODE_BYTES, deadline))
            if not self._seal.verify([prefix, encoded, *map(frames.view_of, buffers)], code):
                raise ProtocolError("a frame has a wrong code")
        tensors = tuple(
            Tensor(dtype, shape, buffer)
            for (dtype, shape), buffer in zip(header.tensors, buffers, strict=True)
        )
        return header, tensors

    def _read(self, num_bytes: int, deadline: float) -> bytearray:
        target = bytearray(num_bytes)
        self._stream.read_into(memoryview(target), deadline)
        return target

    def _check_open(self) -> None:
        if self._broken is not None:
            raise PeerGoneError(self._broken)

    def _break(self, reason: str) -> PeerGoneError:
        self._broken = self._broken or reason
        self._stream.close()
        return PeerGoneError(self._broken)
