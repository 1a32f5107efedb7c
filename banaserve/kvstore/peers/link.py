"""Connections to the store of one other machine, each with its own thread."""

from __future__ import annotations

import math
import queue
import socket
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import NamedTuple

from banaserve.base.errors import ProtocolError
from banaserve.base.platform.linux import since_received_s
from banaserve.kvstore.peers import messages
from banaserve.kvstore.tiers.interface import BlockBytes, TierOutcome
from banaserve.kvstore.tiers.mailbox import Mailbox
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.channels.connect import over_tcp
from banaserve.transport.errors import PeerGoneError, TransferTimeoutError, TransportError
from banaserve.transport.interface import Message

HEARTBEAT_S = 0.5
"""Time without a question, in seconds, after which a peer is asked whether it answers."""
ANSWER_S = 2.0
"""Maximum wait for an answer, in seconds; with the heartbeat, a peer that hangs is considered gone
within three seconds."""
CONNECT_S = 2.0
RETRY_S = 1.0
LOAD_S = 20.0
NUM_STREAMS = 3
"""Number of connections for blocks, so that one block is checked and copied while others arrive."""


@dataclass(eq=False, slots=True)
class PeerLoad:
    """Load of a block from a peer into ``memory``, whose bytes are valid only once it is DONE."""

    ticket: int
    key: bytes
    memory: BlockBytes
    link: PeerLink
    outcome: TierOutcome | None = None


class AskedPeer(NamedTuple):
    """Peer's states of ``keys``: a ``Lookup`` in each byte; None if the peer did not answer."""

    link: PeerLink
    keys: list[bytes]
    states: bytes | None


class LinkChange(NamedTuple):
    """Change of a link: ``problem`` is why the peer does not answer, empty if it answers now."""

    link: PeerLink
    problem: str


PeerEvent = PeerLoad | AskedPeer | LinkChange


class PeerLink:
    """Link to another store: one connection for questions about blocks, others for blocks.

    Both sides know ``key``. The owner of the link sets ``problem``, the reason why the peer is not
    asked, from ``LinkChange`` events.

    Raises:
        RuntimeError: The process or its container has no more threads.
    """

    def __init__(self, host: str, port: int, key: bytes, events: Mailbox[PeerEvent]) -> None:
        self.name = f"{host}:{port}"
        self.problem = f"{self.name}: not reached yet"
        self.address = (host, port)
        self._key = key
        self._events = events
        self._asks: queue.SimpleQueue[list[bytes]] = queue.SimpleQueue()
        self._loads: queue.SimpleQueue[PeerLoad | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._channels: dict[StreamChannel, socket.socket] = {}
        self._is_up = threading.Event()
        self._is_over = threading.Event()
        self._threads: list[threading.Thread] = []
        # The thread that connects is last: if one does not start, those before it can end at once.
        for target in (*[self._load_for_ever] * NUM_STREAMS, self._ask_for_ever):
            thread = threading.Thread(target=target, name=f"peer-{self.name}", daemon=True)
            try:
                thread.start()
            except RuntimeError:
                self.close()
                raise
            self._threads.append(thread)

    def ask(self, keys: list[bytes]) -> None:
        """Ask about at most ``MAX_KEYS`` keys; the answer is an event."""
        self._asks.put(keys)

    def load(self, load: PeerLoad) -> None:
        """Fetch a block; the end of the load is an event."""
        self._loads.put(load)

    def close(self) -> None:
        """Abort all transfers; return when no thread touches memory any more."""
        self._is_over.set()
        self._break_off()
        self._asks.put([])
        for _ in range(NUM_STREAMS):
            self._loads.put(None)
        for thread in self._threads:
            thread.join()

    # ---- asking, which also finds out whether the peer answers

    def _ask_for_ever(self) -> None:
        while not self._is_over.is_set():
            try:
                channel = self._connected()
            except (TransportError, ProtocolError) as error:
                self._say(LinkChange(self, f"{self.name}: {error}"))
                self._refuse_until(time.monotonic() + RETRY_S)
                continue
            self._is_up.set()
            self._say(LinkChange(self, ""))
            try:
                self._ask_on(channel)
            except (TransportError, ProtocolError) as error:
                self._is_up.clear()
                self._say(LinkChange(self, f"{self.name}: {error}"))
                # Blocks that are on their way from a peer that hangs would never arrive.
                self._break_off()
            finally:
                self._drop(channel)

    def _ask_on(self, channel: StreamChannel) -> None:
        while not self._is_over.is_set():
            try:
                keys = self._asks.get(timeout=HEARTBEAT_S)
            except queue.Empty:
                keys = []
            states: bytes | None = None
            try:
                states = _states(channel, keys)
            except TransferTimeoutError:
                # If blocks keep arriving, the answer is behind them: the link is slow, but the
                # peer is alive.
                if not self._is_sending():
                    raise
            finally:
                if keys:
                    self._say(AskedPeer(self, keys, states))

    def _refuse_until(self, until_s: float) -> None:
        """Answer questions with None until ``until_s``, because the peer cannot be reached."""
        while not self._is_over.is_set() and (left_s := until_s - time.monotonic()) > 0:
            with suppress(queue.Empty):
                keys = self._asks.get(timeout=left_s)
                self._say(AskedPeer(self, keys, None))

    # ---- blocks

    def _load_for_ever(self) -> None:
        channel: StreamChannel | None = None
        while (load := self._loads.get()) is not None:
            try:
                if channel is None or channel not in self._channels:
                    channel = self._connected_to_running()
                load.outcome = _fetch(channel, load)
            except (TransportError, ProtocolError):
                load.outcome = TierOutcome.FAILED
                if channel is not None:
                    self._drop(channel)
                channel = None
            self._say(load)
        if channel is not None:
            self._drop(channel)

    def _connected_to_running(self) -> StreamChannel:
        if self._is_over.is_set() or not self._is_up.is_set():
            raise PeerGoneError("it does not answer")
        return self._connected()

    def _is_sending(self) -> bool:
        """Return whether data has arrived on any connection within half of ``ANSWER_S``."""
        with self._lock:
            socks = list(self._channels.values())
        return any(_silent_s(sock) < ANSWER_S / 2 for sock in socks)

    # ---- both

    def _connected(self) -> StreamChannel:
        channel, sock = connect_to_peer(self.address, self._key)
        with self._lock:
            self._channels[channel] = sock
        if self._is_over.is_set():
            self._drop(channel)
            raise PeerGoneError("closed")
        return channel

    def _drop(self, channel: StreamChannel) -> None:
        channel.close()
        with self._lock:
            self._channels.pop(channel, None)

    def _break_off(self) -> None:
        with self._lock:
            channels = list(self._channels)
            self._channels.clear()
        for channel in channels:
            channel.close()

    def _say(self, event: PeerEvent) -> None:
        if not self._is_over.is_set() or isinstance(event, PeerLoad):
            self._events.put(event)


def connect_to_peer(address: tuple[str, int], key: bytes) -> tuple[StreamChannel, socket.socket]:
    """Connect to a peer that knows the key and speaks this version; return channel and socket.

    Raises:
        TransportError: The peer cannot be reached, does not answer, or does not know the key.
        ProtocolError: The peer speaks another version.
    """
    deadline = time.monotonic() + CONNECT_S
    try:
        sock = socket.create_connection(address, CONNECT_S)
    except TimeoutError:
        raise TransferTimeoutError("it does not answer") from None
    except (OSError, UnicodeError) as error:  # the latter of a name that is no name of a host
        raise PeerGoneError(f"{getattr(error, 'strerror', None) or error}") from None
    channel = over_tcp(sock, key, deadline, listening=False)
    try:
        answer, _ = exchange(channel, messages.PeerHello(messages.VERSION), ANSWER_S)
        if not isinstance(answer, messages.PeerWelcome) or answer.version != messages.VERSION:
            raise ProtocolError("it speaks another version: install the same banaserve")
    except BaseException:
        channel.close()
        raise
    return channel, sock


def exchange(
    channel: StreamChannel,
    request: messages.PeerRequest,
    timeout_s: float,
    into: Sequence[BlockBytes] = (),
) -> tuple[messages.PeerReply, Message]:
    """Send a request and return its answer, whose tensors are received into the memory ``into``.

    Raises:
        TransportError: There is no answer.
        ProtocolError: The answer is invalid.
    """
    message = channel.call(messages.message_of(request), timeout_s, into)
    return messages.reply_in(message), message


def _states(channel: StreamChannel, keys: list[bytes]) -> bytes:
    answer, _ = exchange(channel, messages.AskBlocks(keys), ANSWER_S)
    if not isinstance(answer, messages.BlockStates) or len(answer.states) != len(keys):
        raise ProtocolError("it has answered something else")
    return answer.states


def _silent_s(sock: socket.socket) -> float:
    try:
        return since_received_s(sock)
    except OSError:  # it is closed
        return math.inf


def _fetch(channel: StreamChannel, load: PeerLoad) -> TierOutcome:
    memory = load.memory
    answer, message = exchange(
        channel, messages.FetchBlock(load.key, memory.size), LOAD_S, [memory]
    )
    match answer:
        case messages.BlockMissing():
            return TierOutcome.MISSING
        case messages.BlockSent() if len(message.tensors) == 1:
            (tensor,) = message.tensors
            if tensor.data.size != memory.size:
                raise ProtocolError("it has sent a block of another size")
            assert tensor.data is memory
            return TierOutcome.DONE
    raise ProtocolError("it has answered something else")
