"""Connection on which blocks are pushed to the store of one other machine, with its thread."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from banaserve.base.errors import ProtocolError
from banaserve.base.net.addresses import written
from banaserve.base.platform.fail_points import FailPoint, InjectedError, reach
from banaserve.kvstore.peers import messages
from banaserve.kvstore.peers.link import ANSWER_S, HEARTBEAT_S, RETRY_S, connect_to_peer, exchange
from banaserve.kvstore.tiers.interface import BlockBytes
from banaserve.kvstore.tiers.mailbox import Mailbox
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.channels.frames import MAX_TENSORS
from banaserve.transport.errors import PeerGoneError, TransportError

log = logging.getLogger(__name__)

SEND_S = 5.0
"""Maximum time to send one message, in seconds: a peer that reads nothing longer is gone."""
IDLE_S = 10.0
"""Time in seconds after which a connection without pushes is closed, before the peer closes it."""
_FRAME_BYTES = 4 << 20


@dataclass(eq=False)
class Push:
    """Blocks of one prompt on their way to a peer. Their memory stays until the push is over.

    Attributes:
        offer: Offer of the blocks, with an id that no other push of this store has.
        memory: Memory of each block.
        wanted: Positions of the blocks that the peer wants; used only by the link's thread.
    """

    offer: messages.OfferPush
    memory: Sequence[BlockBytes]
    wanted: set[int] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class _Range:
    push: Push
    numbers: Sequence[int]
    first_byte: int
    end_byte: int

    def follows(self, other: _Range) -> bool:
        """Return whether this range is the next one of the same blocks."""
        is_same = other.push is self.push and other.numbers == self.numbers
        return is_same and other.end_byte == self.first_byte


@dataclass(frozen=True, slots=True)
class _End:
    push: Push
    done: Sequence[int]
    failed: Sequence[int]
    is_last: bool


_Item = Push | _Range | _End | messages.HoldRead | messages.PeerAlive
_ALIVE = messages.PeerAlive()


class PushLink:
    """Link that pushes blocks to one store, in the order in which they are reported to be ready.

    If the peer cannot be reached, or is lost, only the pushes under way fail. Each push that is
    over, so that its memory is no longer read, is put into ``over``.
    """

    def __init__(self, address: tuple[str, int], key: bytes, over: Mailbox[Push]) -> None:
        self.name = written(*address)
        self._address = address
        self._key = key
        self._over = over
        self._items: queue.SimpleQueue[_Item | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._channel: StreamChannel | None = None
        self._active: set[Push] = set()
        self._next_items: deque[_Item | None] = deque(maxlen=1)
        self._idle_s = 0.0
        self._retry_at_s = 0.0
        self._is_over = False
        self._thread = threading.Thread(target=self._run, name=f"push-{self.name}", daemon=True)
        self._thread.start()

    def begin(self, push: Push) -> None:
        """Offer blocks, whose progress the caller reports by ``ready`` and ``end``."""
        self._items.put(push)

    def ready(self, push: Push, numbers: Sequence[int], first_byte: int, end_byte: int) -> None:
        """Report that the bytes in this range of these blocks are final, unless a block fails."""
        self._items.put(_Range(push, numbers, first_byte, end_byte))

    def end(self, push: Push, done: Sequence[int], failed: Sequence[int], *, is_last: bool) -> None:
        """Report that the ``done`` blocks, all ready, may be read, the ``failed`` ones never."""
        self._items.put(_End(push, done, failed, is_last))

    def end_hold(self, hold: int, reader: int | None) -> None:
        """Report that a decode leg has read its hold; if the peer misses this, the hold expires."""
        self._items.put(messages.HoldRead(hold, reader))

    def close(self) -> None:
        """Abort all pushes; return when the thread no longer touches memory."""
        with self._lock:
            self._is_over = True
            channel = self._channel
        if channel is not None:
            channel.close()
        self._items.put(None)
        self._thread.join()

    def _run(self) -> None:
        while not self._is_over:
            item = self._next()
            if item is None:
                return
            if isinstance(item, _Range):
                item = self._with_next(item)
            try:
                self._do(item)
            except (TransportError, ProtocolError, InjectedError) as error:
                self._lose(error)

    def _with_next(self, item: _Range) -> _Range:
        """Return ``item`` extended by the next layers of the same blocks that are ready already.

        A link that lags behind sends runs of many layers at once: at 10 Gbit/s, the peer could not
        keep up with a message for each small layer.
        """
        while not self._next_items:
            try:
                following = self._items.get_nowait()
            except queue.Empty:
                break
            if isinstance(following, _Range) and following.follows(item):
                item = replace(item, end_byte=following.end_byte)
            else:
                self._next_items.append(following)
        return item

    def _next(self) -> _Item | None:
        if self._next_items:
            return self._next_items.popleft()
        try:
            return self._items.get(timeout=HEARTBEAT_S if self._channel is not None else None)
        except queue.Empty:
            return _ALIVE

    def _do(self, item: _Item) -> None:
        match item:
            case Push():
                self._active.add(item)
                self._offer(item)
            case messages.PeerAlive():
                self._keep_alive()
            case messages.HoldRead():
                self._tell_read(item)
            case _Range(push) | _End(push) if push not in self._active:
                return  # its connection was lost
            case _Range(push, numbers, first_byte, end_byte):
                wanted = [number for number in numbers if number in push.wanted]
                self._send_range(push, wanted, first_byte, end_byte)
            case _End(push, done, failed, is_last):
                self._send_end(push, done, failed)
                if is_last:
                    self._forget(push)

    def _offer(self, push: Push) -> None:
        if self._channel is None and time.monotonic() < self._retry_at_s:
            self._forget(push)
            return
        answer, _ = exchange(self._connected(), push.offer, ANSWER_S)
        if not isinstance(answer, messages.PushWanted):
            raise ProtocolError("it has answered something else")
        push.wanted = set(answer.numbers)
        self._idle_s = 0.0

    def _tell_read(self, read: messages.HoldRead) -> None:
        if self._channel is None and time.monotonic() < self._retry_at_s:
            return
        self._connected()
        self._send(read)
        self._idle_s = 0.0

    def _connected(self) -> StreamChannel:
        if self._channel is None:
            channel, _ = connect_to_peer(self._address, self._key)
            with self._lock:
                self._channel = channel
                if self._is_over:
                    raise PeerGoneError("closed")
        return self._channel

    def _keep_alive(self) -> None:
        self._idle_s = 0.0 if self._active else self._idle_s + HEARTBEAT_S
        if self._idle_s >= IDLE_S:
            self._drop_channel()
        elif self._active:
            self._send(messages.PeerAlive())

    def _send_range(self, push: Push, numbers: Sequence[int], first: int, end: int) -> None:
        for some, first_byte, end_byte in _frames(numbers, first, end):
            reach(FailPoint.PEER_PUSH)
            parts = [push.memory[number][first_byte:end_byte] for number in some]
            self._send(messages.PushRange(push.offer.push_id, some, first_byte), *parts)

    def _send_end(self, push: Push, done: Sequence[int], failed: Sequence[int]) -> None:
        of_peer = [[number for number in one if number in push.wanted] for one in (done, failed)]
        if any(of_peer):
            self._send(messages.EndPush(push.offer.push_id, *of_peer))

    def _send(self, said: messages.PeerRequest, *blocks: BlockBytes) -> None:
        if self._channel is None:
            raise PeerGoneError("the connection is lost")
        self._channel.send(messages.message_of(said, *blocks), SEND_S)

    def _forget(self, push: Push) -> None:
        self._active.discard(push)
        self._over.put(push)

    def _lose(self, error: Exception) -> None:
        if not self._is_over:
            log.warning(
                "%s: %d pushes of blocks are broken off: %s", self.name, len(self._active), error
            )
        self._retry_at_s = time.monotonic() + RETRY_S
        self._drop_channel()
        for push in list(self._active):
            self._forget(push)

    def _drop_channel(self) -> None:
        with self._lock:
            channel, self._channel = self._channel, None
        if channel is not None:
            channel.close()


def _frames(numbers: Sequence[int], first: int, end: int) -> Iterator[tuple[list[int], int, int]]:
    """Yield ranges of some of the blocks at a time, each small enough for one frame."""
    if end <= first:
        return
    for first_byte in range(first, end, _FRAME_BYTES):
        end_byte = min(end, first_byte + _FRAME_BYTES)
        at_once = min(MAX_TENSORS, max(1, _FRAME_BYTES // (end_byte - first_byte)))
        for at in range(0, len(numbers), at_once):
            yield list(numbers[at : at + at_once]), first_byte, end_byte
