"""Frames of messages on a byte stream: the length of a message in four bytes, then its msgpack.

``Framing.encode`` makes a frame, and ``MessageReader`` finds the messages in received bytes,
wherever these were split. Both do no I/O: they serve blocking sockets, selectors, pipes and asyncio
alike. ``receive`` and ``receive_async`` are the loops of callers that wait for one message.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

import msgspec

from banaserve.base.errors import ProtocolError

LENGTH_BYTES = 4
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")


class Framing(Generic[T]):
    """Frames of one kind of message.

    Args:
        kind: Type of the messages.
        max_bytes: Maximum length of a message, in both directions.
    """

    def __init__(self, kind: Any, max_bytes: int) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)
        self._max_bytes = max_bytes

    def encode(self, message: T) -> bytes:
        """Return the frame of a message.

        Raises:
            ProtocolError: The message is longer than the maximum.
        """
        body = _encoder.encode(message)
        self._check(len(body))
        return _LENGTH.pack(len(body)) + body

    def length_of(self, frame: bytes | bytearray) -> int:
        """Return the length of a frame's message from the first ``LENGTH_BYTES`` of the frame.

        Raises:
            ProtocolError: The length is over the maximum.
        """
        num_bytes: int = _LENGTH.unpack_from(frame)[0]
        self._check(num_bytes)
        return num_bytes

    def decode(self, body: bytes | bytearray | memoryview) -> T:
        """Return the message of a frame without its length; see ``decode``."""
        return decode(self._decoder, body)

    def _check(self, num_bytes: int) -> None:
        if num_bytes > self._max_bytes:
            raise ProtocolError(
                f"a message of {num_bytes} bytes is too large: at most {self._max_bytes}"
            )


def decode(decoder: msgspec.msgpack.Decoder[T], body: bytes | bytearray | memoryview) -> T:
    """Return the message whose msgpack is ``body``.

    Raises:
        ProtocolError: The bytes are not such a message.
    """
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a message: {str(error)!r}") from None


class MessageReader(Generic[T]):
    """Decoder of received bytes into messages. It is unusable after a ``ProtocolError``."""

    def __init__(self, framing: Framing[T]) -> None:
        self._framing = framing
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes; ``take`` returns the messages that they complete."""
        self._buffer += data

    def take(self) -> T | None:
        """Return the next message; None while it is incomplete.

        Raises:
            ProtocolError: The bytes are not a message, or the message is too large.
        """
        end = self._end()
        if len(self._buffer) < end:
            return None
        # Not copied first: that takes three times as long for 64 KiB.
        message = self._framing.decode(memoryview(self._buffer)[LENGTH_BYTES:end])
        del self._buffer[:end]
        return message

    @property
    def num_missing(self) -> int:
        """Number of bytes that can be read next without a byte of a later message.

        Known after ``take`` has returned None.
        """
        return self._end() - len(self._buffer)

    def _end(self) -> int:
        """Return the number of bytes of the next frame, or of its length before that is known."""
        if len(self._buffer) < LENGTH_BYTES:
            return LENGTH_BYTES
        return LENGTH_BYTES + self._framing.length_of(self._buffer)


def receive(read: Callable[[int], bytes], reader: MessageReader[T]) -> T | None:
    """Return the next message; None if the stream ends before the end of a message.

    Args:
        read: Function that waits for bytes; returns none at the end. It is given the number that is
            missing, and may return more if all that is read of the stream is for this reader.

    Raises:
        ProtocolError: The bytes are not a message, or the message is too large.
    """
    while (message := reader.take()) is None:
        if not (data := read(reader.num_missing)):
            return None
        reader.feed(data)
    return message


async def receive_async(
    read: Callable[[int], Awaitable[bytes]], reader: MessageReader[T]
) -> T | None:
    """Do the same as ``receive`` without blocking the event loop."""
    while (message := reader.take()) is None:
        if not (data := await read(reader.num_missing)):
            return None
        reader.feed(data)
    return message
