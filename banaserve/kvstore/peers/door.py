"""Door of a store for its peers: those who prove that they know the key fetch and push blocks."""

from __future__ import annotations

import logging
import resource
import socket
import time
from collections.abc import Sequence
from contextlib import AbstractContextManager, closing
from typing import Protocol

from banaserve.errors import BanaServeError, ProtocolError, UserError
from banaserve.fail_points import FailPoint, reach
from banaserve.kvstore.interface import Lookup
from banaserve.kvstore.peers.messages import (
    VERSION,
    AskBlocks,
    BlockMissing,
    BlockSent,
    BlockStates,
    EndPush,
    FetchBlock,
    HoldRead,
    OfferPush,
    PeerAlive,
    PeerHello,
    PeerReply,
    PeerRequest,
    PeerWelcome,
    PushRange,
    PushWanted,
    message_of,
    request_in,
)
from banaserve.kvstore.peers.reception import BlockSink, Reception
from banaserve.kvstore.tiers.interface import BlockBytes
from banaserve.net.descriptors import connections_within
from banaserve.net.keep_alive import keep_alive
from banaserve.net.refusal_log import RefusalLog
from banaserve.transport.channel import StreamChannel
from banaserve.transport.connect import over_tcp
from banaserve.transport.interface import Message
from banaserve.transport.service import GREETING_S, MAX_STRANGERS, ConnectionPlaces, Service

log = logging.getLogger(__name__)

SILENT_S = 30.0
"""A peer asks at least once a second; one that says nothing for so long is gone."""
PUSH_SILENT_S = 2.5
"""The same of one that pushes blocks, which says that it is there when it has none to send: readers
may be waiting for them."""
SEND_S = 30.0
MAX_PUSHES = 256
"""At once on one connection."""
_BACKLOG = 64
_MOST_CONNECTIONS = 8192
"""Of peers: each has about five, so those of 1,600 nodes. One is a thread that mostly waits."""
_RESERVED_DESCRIPTORS = 512
"""For clients, links to peers, and tiers."""


class BlockSource(Protocol):
    """Blocks that may be given away. Any thread may call; both raise where the store is busy."""

    def states(self, keys: Sequence[bytes]) -> list[Lookup]:
        """What is known of each key."""
        ...

    def lent(self, key: bytes, num_bytes: int) -> AbstractContextManager[BlockBytes | None]:
        """The bytes of a block, which stay while the context lasts; None where it is not there."""
        ...


class PeerDoor:
    """Serves blocks to peers until ``close``.

    Args:
        host: Address to listen on.
        port: 0 takes a free one.
        key: What peers have to know.
        source: Of the blocks.
        sink: Of blocks that peers push.

    Raises:
        UserError: The address cannot be had.
    """

    def __init__(
        self, host: str, port: int, key: bytes, source: BlockSource, sink: BlockSink
    ) -> None:
        self._key = key
        self._source = source
        self._sink = sink
        listener = _listen(host, port)
        keep_alive(listener)
        self.port: int = listener.getsockname()[1]
        self._refusals = RefusalLog(log.warning)
        # Peers are not listed: whoever knows the key may come, from however many nodes there are.
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        num_places = connections_within(limit, _MOST_CONNECTIONS, _RESERVED_DESCRIPTORS)
        self._places = ConnectionPlaces(num_places, num_strangers=MAX_STRANGERS)
        self._service = Service("store-peers", listener, self._serve, self._places)

    def close(self) -> None:
        """End every connection and stop listening."""
        self._service.close()

    def _serve(self, sock: socket.socket) -> None:
        name = _name_of(sock)
        try:
            deadline = time.monotonic() + GREETING_S
            channel = over_tcp(sock, self._key, deadline, listening=True)
        except BanaServeError as error:
            self._refusals.say("greeting", f"turned away {name}: {error}")
            return
        with closing(channel):
            if not self._places.proved(sock):
                return
            try:
                _Visit(channel, self._source, self._sink).run()
            except ProtocolError as error:
                self._refusals.say("protocol", f"closed the connection to {name}: {error}")


class _Visit:
    """One peer on one connection, until it goes."""

    def __init__(self, channel: StreamChannel, source: BlockSource, sink: BlockSink) -> None:
        self._channel = channel
        self._source = source
        self._sink = sink
        self._pushes: dict[int, Reception] = {}

    def run(self) -> None:
        try:
            while True:
                silent_s = PUSH_SILENT_S if self._pushes else SILENT_S
                message = self._channel.receive(silent_s, self._place)
                reach(FailPoint.PEER_REQUEST)
                self._answer(message)
        finally:
            # What has not ended will not come: its readers are told so.
            for reception in self._pushes.values():
                self._sink.end(reception, [], reception.open)

    def _place(self, body: bytes, sizes: Sequence[int]) -> Sequence[BlockBytes]:
        try:
            request = request_in(body)
            if not isinstance(request, PushRange) or request.push_id not in self._pushes:
                return ()
            return self._pushes[request.push_id].targets(request, sizes)
        except ProtocolError:  # said once the message has been checked
            return ()

    def _answer(self, message: Message) -> None:
        request: PeerRequest = request_in(message.body)
        match request:
            case PeerHello(version):
                # Whoever speaks another version hears which one is spoken here, and leaves.
                self._reply(message, PeerWelcome(VERSION))
                if version != VERSION:
                    raise ProtocolError(f"it speaks version {version}, this store {VERSION}")
            case AskBlocks(keys):
                states = self._source.states(keys) if keys else []
                self._reply(message, BlockStates(bytes(states)))
            case FetchBlock(key, num_bytes):
                with self._source.lent(key, num_bytes) as block:
                    if block is None:
                        self._reply(message, BlockMissing())
                    else:
                        self._reply(message, BlockSent(), block)
            case OfferPush(push_id):
                if push_id in self._pushes or len(self._pushes) >= MAX_PUSHES:
                    raise ProtocolError("a push that is under way, or one too many")
                reception = self._sink.accept(request)
                if reception.open:
                    self._pushes[push_id] = reception
                self._reply(message, PushWanted(reception.wanted))
            case PushRange(push_id):
                self._push(push_id).received(request, message.tensors)
            case EndPush(push_id, done, failed):
                reception = self._push(push_id)
                reception.ended(done, failed)
                if not reception.open:
                    del self._pushes[push_id]
                self._sink.end(reception, done, failed)
            case HoldRead(hold, reader):
                self._sink.end_hold(hold, reader)
            case PeerAlive():
                return

    def _push(self, push_id: int) -> Reception:
        if push_id not in self._pushes:
            raise ProtocolError("a part of a push that is not under way")
        return self._pushes[push_id]

    def _reply(self, message: Message, said: PeerReply, *blocks: BlockBytes) -> None:
        self._channel.reply(message, message_of(said, *blocks), SEND_S)


def _listen(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        raise UserError(f"--kv-store-listen {host}:{port}: {error.strerror or error}") from error


def _name_of(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "a peer that has left"
    return f"{host}:{port}"
