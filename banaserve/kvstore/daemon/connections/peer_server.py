"""Server of a store for its peers: peers that prove to know the key fetch and push blocks."""

from __future__ import annotations

import logging
import resource
import socket
import time
from collections.abc import Sequence
from contextlib import closing

from banaserve.base.errors import BanaServeError, ProtocolError, UserError
from banaserve.base.fail_points import FailPoint, reach
from banaserve.base.net.refusal_log import RefusalLog
from banaserve.base.net.sockets import connections_within, keep_alive
from banaserve.kvstore.daemon.pool_access import PoolAccess
from banaserve.kvstore.daemon.pushes.receiving import Reception
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
from banaserve.kvstore.tiers.interface import BlockBytes
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.channels.connect import over_tcp
from banaserve.transport.channels.threaded_server import (
    GREETING_S,
    MAX_STRANGERS,
    ConnectionPlaces,
    Service,
    listen_tcp,
)
from banaserve.transport.errors import RefusedError
from banaserve.transport.interface import Message

log = logging.getLogger(__name__)

SILENT_S = 30.0
"""Silence in seconds after which a peer is considered gone; it asks at least once a second."""
PUSH_SILENT_S = 2.5
"""``SILENT_S`` for a peer that is pushing blocks. Such a peer sends ``PeerAlive`` when it has no
block to send; the limit is short because readers may be waiting for the blocks."""
SEND_S = 30.0
MAX_PUSHES = 256
"""Maximum number of pushes under way on one connection."""
_MOST_CONNECTIONS = 8192
"""Maximum number of connections of peers. A peer has about five, so it suffices for 1,600 nodes;
each connection takes a thread that mostly waits."""
_RESERVED_DESCRIPTORS = 512
"""Number of file descriptors kept for clients, links to peers, and tiers."""


class PeerServer:
    """Server of blocks to peers until ``close``.

    Args:
        host: Address to listen on.
        port: Port to listen on; 0 takes a free one.
        key: Key that peers have to know.
        access: Source of the blocks that peers fetch, and receiver of those that they push.

    Raises:
        UserError: The address is not available.
    """

    def __init__(self, host: str, port: int, key: bytes, access: PoolAccess) -> None:
        self._key = key
        self._access = access
        try:
            listener = listen_tcp(host, port)
        except RefusedError as error:
            raise UserError(f"--kv-store-listen: {error}") from error
        keep_alive(listener)
        self.port: int = listener.getsockname()[1]
        self._refusals = RefusalLog(log.warning)
        # There is no list of peers: any peer that knows the key may connect, from any number of
        # nodes.
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
                _Visit(channel, self._access).run()
            except ProtocolError as error:
                self._refusals.say("protocol", f"closed the connection to {name}: {error}")


class _Visit:
    """Visit of a peer: one connection until its end."""

    def __init__(self, channel: StreamChannel, access: PoolAccess) -> None:
        self._channel = channel
        self._access = access
        self._pushes: dict[int, Reception] = {}

    def run(self) -> None:
        try:
            while True:
                silent_s = PUSH_SILENT_S if self._pushes else SILENT_S
                message = self._channel.receive(silent_s, self._place)
                reach(FailPoint.PEER_REQUEST)
                self._answer(message)
        finally:
            # Blocks whose push has not ended will not arrive: notify their readers.
            for reception in self._pushes.values():
                self._access.end(reception, [], reception.open)

    def _place(self, body: bytes, sizes: Sequence[int]) -> Sequence[BlockBytes]:
        try:
            request = request_in(body)
            if not isinstance(request, PushRange) or request.push_id not in self._pushes:
                return ()
            return self._pushes[request.push_id].targets(request, sizes)
        except ProtocolError:  # raised again once the message has been checked
            return ()

    def _answer(self, message: Message) -> None:
        request: PeerRequest = request_in(message.body)
        match request:
            case PeerHello(version):
                # A peer of another version learns this store's version, and is disconnected.
                self._reply(message, PeerWelcome(VERSION))
                if version != VERSION:
                    raise ProtocolError(f"it speaks version {version}, this store {VERSION}")
            case AskBlocks(keys):
                states = self._access.states(keys) if keys else []
                self._reply(message, BlockStates(bytes(states)))
            case FetchBlock(key, num_bytes):
                with self._access.lent(key, num_bytes) as block:
                    if block is None:
                        self._reply(message, BlockMissing())
                    else:
                        self._reply(message, BlockSent(), block)
            case OfferPush(push_id):
                if push_id in self._pushes or len(self._pushes) >= MAX_PUSHES:
                    raise ProtocolError("a push that is under way, or one too many")
                reception = self._access.accept(request)
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
                self._access.end(reception, done, failed)
            case HoldRead(hold, reader):
                self._access.end_hold(hold, reader)
            case PeerAlive():
                return

    def _push(self, push_id: int) -> Reception:
        if push_id not in self._pushes:
            raise ProtocolError("a part of a push that is not under way")
        return self._pushes[push_id]

    def _reply(self, message: Message, said: PeerReply, *blocks: BlockBytes) -> None:
        self._channel.reply(message, message_of(said, *blocks), SEND_S)


def _name_of(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "a peer that has left"
    return f"{host}:{port}"
