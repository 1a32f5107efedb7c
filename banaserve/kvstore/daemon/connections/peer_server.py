"""Server of a store for its peers: peers that prove to know the key fetch and push blocks.

A thread serves each connection, and reaches the pool's blocks through the daemon's thread.
"""

from __future__ import annotations

import logging
import resource
import selectors
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from contextlib import closing, contextmanager
from typing import Any, TypeVar

from banaserve.base.errors import (
    BanaServeError,
    ProtocolError,
    StoreUnavailableError,
    UserError,
)
from banaserve.base.net.refusal_log import RefusalLog
from banaserve.base.net.sockets import connections_within, keep_alive
from banaserve.base.platform.fail_points import FailPoint, reach
from banaserve.kvstore.daemon.pushes.receiving import Reception
from banaserve.kvstore.daemon.service import StoreService
from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.peers import messages
from banaserve.kvstore.tiers.interface import BlockBytes
from banaserve.kvstore.tiers.mailbox import Mailbox
from banaserve.transport.channels.channel import StreamChannel
from banaserve.transport.channels.connect import over_tcp
from banaserve.transport.errors import RefusedError
from banaserve.transport.interface import Message
from banaserve.transport.threaded_server import (
    GREETING_S,
    MAX_STRANGERS,
    ConnectionPlaces,
    Service,
    listen_tcp,
)

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
ANSWER_S = 5.0
"""Maximum wait for the daemon's thread, in seconds."""
T = TypeVar("T")


class PeerServer:
    """Server of blocks to peers that know ``key``, until ``close``; port 0 takes a free port.

    Raises:
        UserError: The address is not available.
    """

    def __init__(self, host: str, port: int, key: bytes, access: PoolAccess) -> None:
        self._key = key
        self._access = access
        try:
            listener = listen_tcp(host, port)
        except RefusedError as error:
            raise UserError(f"address for peers: {error}") from error
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
        """End every connection and stop listening; close the access."""
        self._service.close()
        self._access.close()

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
            request = messages.request_in(body)
            if not isinstance(request, messages.PushRange) or request.push_id not in self._pushes:
                return ()
            return self._pushes[request.push_id].targets(request, sizes)
        except ProtocolError:  # raised again once the message has been checked
            return ()

    def _answer(self, message: Message) -> None:
        request: messages.PeerRequest = messages.request_in(message.body)
        match request:
            case messages.PeerHello(version):
                # A peer of another version learns this store's version, and is disconnected.
                self._reply(message, messages.PeerWelcome(messages.VERSION))
                if version != messages.VERSION:
                    raise ProtocolError(
                        f"it speaks version {version}, this store {messages.VERSION}"
                    )
            case messages.AskBlocks(keys):
                states = self._access.states(keys) if keys else []
                self._reply(message, messages.BlockStates(bytes(states)))
            case messages.FetchBlock(key, num_bytes):
                with self._access.lent(key, num_bytes) as block:
                    if block is None:
                        self._reply(message, messages.BlockMissing())
                    else:
                        self._reply(message, messages.BlockSent(), block)
            case messages.OfferPush(push_id):
                if push_id in self._pushes or len(self._pushes) >= MAX_PUSHES:
                    raise ProtocolError("a push that is under way, or one too many")
                reception = self._access.accept(request)
                if reception.open:
                    self._pushes[push_id] = reception
                self._reply(message, messages.PushWanted(reception.wanted))
            case messages.PushRange(push_id):
                self._push(push_id).received(request, message.tensors)
            case messages.EndPush(push_id, done, failed):
                reception = self._push(push_id)
                reception.ended(done, failed)
                if not reception.open:
                    del self._pushes[push_id]
                self._access.end(reception, done, failed)
            case messages.HoldRead(hold, reader):
                self._access.end_hold(hold, reader)
            case messages.PeerAlive():
                return

    def _push(self, push_id: int) -> Reception:
        if push_id not in self._pushes:
            raise ProtocolError("a part of a push that is not under way")
        return self._pushes[push_id]

    def _reply(self, message: Message, said: messages.PeerReply, *blocks: BlockBytes) -> None:
        self._channel.reply(message, messages.message_of(said, *blocks), SEND_S)


def _name_of(sock: socket.socket) -> str:
    try:
        host, port = sock.getpeername()[:2]
    except OSError:
        return "a peer that has left"
    return f"{host}:{port}"


class PoolAccess:
    """Lender of blocks to peers and receiver of theirs. Any thread may call.

    Each call is run in the daemon's thread, which alone accesses the index. A method that returns
    something waits for it, and raises StoreUnavailableError if the daemon's thread has not begun
    the call in time; the others do not wait. ``selector`` is that of the daemon's thread.
    """

    def __init__(self, service: StoreService, selector: selectors.BaseSelector) -> None:
        self._service = service
        self._selector = selector
        self._calls: Mailbox[tuple[Callable[[], Any], Future[Any]]] = Mailbox()
        selector.register(self._calls.fd, selectors.EVENT_READ, self._on_calls)

    def states(self, keys: Sequence[bytes]) -> list[Lookup]:
        """Return which keys can be lent; not those in tiers, since each store has its own tiers.

        PENDING: the block is being written.
        """
        return self._call(lambda: self._service.index.lookup(keys))

    @contextmanager
    def lent(self, key: bytes, num_bytes: int) -> Iterator[BlockBytes | None]:
        """Lend the bytes of a block, which stay while the context lasts; None if it is absent."""
        found = self._call(lambda: self._service.lend(key, num_bytes))
        if found is None:
            yield None
            return
        entry, memory = found
        try:
            yield memory
        finally:
            self._submit(lambda: self._service.take_back(entry))

    def accept(self, offer: messages.OfferPush) -> Reception:
        """Give slots to those blocks of an offer that are not in the pool, if there is room."""
        return self._call(lambda: self._service.receiving.accept(offer))

    def end(self, reception: Reception, done: Sequence[int], failed: Sequence[int]) -> None:
        """Make the ``done`` blocks readable, and drop the ``failed`` ones."""
        self._submit(lambda: self._service.receiving.end(reception, done, failed))

    def end_hold(self, hold: int, reader: int | None) -> None:
        """End a hold for a decode leg that has read its blocks; None for all legs."""
        self._submit(lambda: self._service.index.end_hold(hold, reader))

    def close(self) -> None:
        """Stop running calls; cancel those that wait."""
        self._selector.unregister(self._calls.fd)
        for _, future in self._calls.take():
            future.cancel()

    def _call(self, act: Callable[[], T]) -> T:
        future = self._submit(act)
        try:
            return future.result(ANSWER_S)
        except TimeoutError:
            # A call that has begun meanwhile may have lent a block; it ends soon.
            if not future.cancel():
                return future.result()
            raise StoreUnavailableError("the store has not answered in time") from None

    def _submit(self, act: Callable[[], T]) -> Future[T]:
        future: Future[T] = Future()
        self._calls.put((act, future))
        return future

    def _on_calls(self, _events: int) -> None:
        self._calls.calm()
        for act, future in self._calls.take():
            if not future.set_running_or_notify_cancel():
                continue
            try:
                future.set_result(act())
            except Exception as error:
                future.set_exception(error)
