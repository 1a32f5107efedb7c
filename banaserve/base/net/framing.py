"""Frames of messages on a byte stream: the length of a message in four bytes, then its msgpack.

``encode`` makes a frame, and ``MessageReader`` finds the messages in received bytes, wherever these
were split. Both do no I/O, so they serve blocking sockets, selectors, pipes and asyncio alike;
``receive`` and ``receive_async`` are the loops of readers that wait for one message.
"""

from __future__ import annotations

import struct
from collections.abc import Awaitable, Callable
from typing import Generic, TypeVar

import msgspec

from banaserve.base.errors import ProtocolError

LENGTH_BYTES = 4
_LENGTH = struct.Struct("<I")
_encoder = msgspec.msgpack.Encoder()
T = TypeVar("T")
Body = bytes | bytearray | memoryview


def encode(message: object, max_bytes: int) -> bytes:
    """Return the frame of a message.

    Args:
        max_bytes: Maximum length of a message that the reader accepts.

    Raises:
        ProtocolError: The message is longer.
    """
    body = _encoder.encode(message)
    _check(len(body), max_bytes)
    return _LENGTH.pack(len(body)) + body


def decode(decoder: msgspec.msgpack.Decoder[T], body: Body) -> T:
    """Return the message whose msgpack is ``body``.

    Raises:
        ProtocolError: The bytes are not such a message.
    """
    try:
        return decoder.decode(body)
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise ProtocolError(f"not a message: {str(error)!r}") from None


def length_of(frame: bytes | bytearray, max_bytes: int) -> int:
    """Return the length of a frame's message from the first ``LENGTH_BYTES`` of the frame.

    Raises:
        ProtocolError: It is over ``max_bytes``.
    """
    num_bytes: int = _LENGTH.unpack_from(frame)[0]
    _check(num_bytes, max_bytes)
    return num_bytes


def _check(num_bytes: int, max_bytes: int) -> None:
    if num_bytes > max_bytes:
        raise ProtocolError(f"a message of {num_bytes} bytes is too large: at most {max_bytes}")


class MessageReader(Generic[T]):
    """Decoder of received bytes into messages. A ``ProtocolError`` makes it unusable.

    Args:
        decoder: Decoder of one message.
        max_bytes: Maximum length of a message; no more than that is kept of an incomplete one.
    """

    def __init__(self, decoder: msgspec.msgpack.Decoder[T], max_bytes: int) -> None:
        self._decoder = decoder
        self._max_bytes = max_bytes
        self._buffer = bytearray()

    def feed(self, data: bytes) -> None:
        """Add received bytes; ``take`` the messages that they complete."""
        self._buffer += data

    def take(self) -> T | None:
        """Return the next message; None while it is incomplete.

        Raises:
            ProtocolError: The bytes are not a message, or the message is too large.
        """
        end = self._end()
        if len(self._buffer) < end:
            return None
        body = self._buffer[LENGTH_BYTES:end]
        del self._buffer[:end]
        return decode(self._decoder, body)

    @property
    def num_missing(self) -> int:
        """Number of bytes to read next, once ``take`` has returned None.

        A caller that reads no more than this reads no byte of the message after the next one.
        """
        return self._end() - len(self._buffer)

    def _end(self) -> int:
        """Return the number of bytes of the next frame, or of its length before that is known."""
        if len(self._buffer) < LENGTH_BYTES:
            return LENGTH_BYTES
        return LENGTH_BYTES + length_of(self._buffer, self._max_bytes)


def receive(read: Callable[[int], bytes], reader: MessageReader[T]) -> T | None:
    """Return the next message; None if the stream ends before the end of a message.

    Args:
        read: Function that waits for bytes and returns at most the given number; none at the end.

    Raises:
        ProtocolError: The bytes are not a message, or the message is too large.
    """
    while (message := reader.take()) is None:
        data = read(reader.num_missing)
        if not data:
            return None
        reader.feed(data)
    return message


async def receive_async(
    read: Callable[[int], Awaitable[bytes]], reader: MessageReader[T]
) -> T | None:
    """Do the same as ``receive`` without blocking the event loop."""
    while (message := reader.take()) is None:
        data = await read(reader.num_missing)
        if not data:
            return None
        reader.feed(data)
    return message
