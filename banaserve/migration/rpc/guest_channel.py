"""Guest's end of its channel; receives and sends in threads while micro-batches run."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future, ThreadPoolExecutor

from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.errors import TransferTimeoutError
from banaserve.transport.interface import Message

_REPLY_TIMEOUT_S = 10.0
_PART_TIMEOUT_S = 300.0
"""Timeout of an answer to a part of a step, in seconds: a host that computes its own layers of the
parts reads no answer meanwhile."""
_READ_S = 60.0


class GuestChannel:
    """Guest's end of its channel.

    A host that sends the next part of a step reads no answer meanwhile, and a socket holds less
    than one part. A guest that read nothing while it computes and sends would therefore wait until
    its host has computed, or deadlock. So one thread reads ahead the parts that are known to
    follow, and another sends the answers. Without parts no thread is used.
    """

    def __init__(self, channel: StreamChannel) -> None:
        self._channel = channel
        self._reader = ThreadPoolExecutor(1, "parts-in")
        self._writer = ThreadPoolExecutor(1, "parts-out")
        self._coming: deque[Future[Message]] = deque()
        self._leaving: Future[None] | None = None
        self._is_part = False

    def expect(self, num_messages: int) -> None:
        """Read ahead the ``num_messages`` messages that follow the present one."""
        self._is_part = self._is_part or num_messages > 0
        while len(self._coming) < num_messages:
            self._coming.append(self._reader.submit(self._read))

    def receive(self, timeout_s: float) -> Message:
        """Return the next message; ``timeout_s`` does not apply to a message that is read ahead.

        Raises:
            TransferTimeoutError: No message arrived in time.
            PeerGoneError: The host is gone.
        """
        self._is_part = bool(self._coming)
        if self._coming:
            return self._coming.popleft().result()
        return self._channel.receive(timeout_s)

    def answer(self, message: Message, answer: Message) -> None:
        """Answer the message that was received last.

        Raises:
            PeerGoneError: The host is gone.
            TransferTimeoutError: The host does not read.
        """
        if self._is_part:
            self._leaving = self._writer.submit(self._send, message, answer, _PART_TIMEOUT_S)
            return
        if self._leaving is not None:
            self._leaving.result()
            self._leaving = None
        self._send(message, answer, _REPLY_TIMEOUT_S)

    def _send(self, message: Message, answer: Message, timeout_s: float) -> None:
        if message.token:
            self._channel.reply(message, answer, timeout_s)
        else:
            self._channel.send(answer, timeout_s)

    def _read(self) -> Message:
        while True:
            try:
                return self._channel.receive(_READ_S)
            except TransferTimeoutError:
                continue

    def close(self) -> None:
        """Let the threads end; the caller must close the channel next."""
        self._reader.shutdown(wait=False, cancel_futures=True)
        self._writer.shutdown(wait=False, cancel_futures=True)
