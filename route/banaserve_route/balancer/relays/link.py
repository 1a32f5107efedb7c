"""Balancer's end of its connection to a relay, and what represents the relay's clients there."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Hashable, Mapping
from typing import Any, cast

from banaserve.base.net.framing import MessageReader
from banaserve_route.balancer.balancer import Balancer
from banaserve_route.balancer.http import replies
from banaserve_route.balancer.http.exchange import Exchange
from banaserve_route.balancer.http.replica_connection import ConnectionPool, Sink
from banaserve_route.balancer.http.request import ClientRequest, RequestRefusedError
from banaserve_route.balancer.http.response import BodyEnd, ResponseHead
from banaserve_route.balancer.relays.messages import (
    TO_BALANCER,
    TO_RELAY,
    AnswerBegan,
    AnswerBroke,
    AnswerEnded,
    ClientClosed,
    ClientKnown,
    ClientOpened,
    CloseClient,
    DropAttempt,
    DropNoted,
    EndRequest,
    RefusalNoted,
    RelayAlive,
    RelayReady,
    RequestArrived,
    SendRequest,
    ToRelay,
    TurnAway,
    WriteAnswer,
)
from banaserve_route.balancer.requests.proxy import ProxiedRequest


class RelayLink(asyncio.Protocol):
    """Connection to a relay. When it ends, the requests of the relay's clients are cancelled.

    Attributes:
        lost: Event that is set when the connection has ended.
        was_heard: True if the relay has sent anything since the owner set this to False.
    """

    def __init__(self, balancer: Balancer, on_ready: Callable[[], None]) -> None:
        """``on_ready`` is called when the relay accepts clients."""
        self.balancer = balancer
        self.lost = asyncio.Event()
        self.was_heard = False
        self._reader = MessageReader(TO_BALANCER)
        self._clients: dict[int, RemoteClient] = {}
        self._exchanges: dict[int, RemoteExchange] = {}
        self._num_attempts = 0
        self._takers: Mapping[type, Callable[[Any], None]] = {
            RelayReady: lambda _: on_ready(),
            RelayAlive: lambda _: None,
            ClientOpened: self._opened,
            ClientKnown: self._known,
            ClientClosed: self._closed,
            RequestArrived: self._arrived,
            AnswerBegan: self._began,
            AnswerEnded: self._ended,
            AnswerBroke: self._broke,
            RefusalNoted: lambda told: balancer.refused(RequestRefusedError(told.status, told.why)),
            DropNoted: lambda told: balancer.dropped(told.cause, told.why),
        }

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self.was_heard = True
        self._reader.feed(data)
        while (message := self._reader.take()) is not None:
            self._takers[type(message)](message)

    def connection_lost(self, exc: Exception | None) -> None:
        for client in list(self._clients.values()):
            client.lost()
        self._clients.clear()
        self.lost.set()

    def send(self, message: ToRelay) -> None:
        """Send a message, unless the relay has ended."""
        if not self._transport.is_closing():
            self._transport.write(TO_RELAY.encode(message))

    def ask(self, client: RemoteClient, url: str, fields: bytes, sink: Sink) -> RemoteExchange:
        """Let the relay send the request of ``client`` to a server."""
        self._num_attempts += 1
        made = self._exchanges[self._num_attempts] = RemoteExchange(
            self, self._num_attempts, client, sink
        )
        self.send(SendRequest(client.request, self._num_attempts, url, fields))
        return made

    def forget(self, attempt: int) -> bool:
        """Ignore further messages about an attempt; return whether it was under way."""
        return self._exchanges.pop(attempt, None) is not None

    # Messages of the relay.

    def _opened(self, told: ClientOpened) -> None:
        client = RemoteClient(self, told.client, told.peer)
        if self.balancer.opened(client):
            self._clients[told.client] = client
        else:
            self.balancer.closed(client)
            self.send(TurnAway(told.client))

    def _known(self, told: ClientKnown) -> None:
        if (client := self._clients.get(told.client)) is not None:
            self.balancer.connections.authenticated(client, client.peer)

    def _closed(self, told: ClientClosed) -> None:
        if (client := self._clients.pop(told.client, None)) is not None:
            client.lost()

    def _arrived(self, told: RequestArrived) -> None:
        if (client := self._clients.get(told.client)) is not None:
            client.take(told)

    def _began(self, told: AnswerBegan) -> None:
        if (exchange := self._exchanges.get(told.attempt)) is not None:
            exchange.began(told)

    def _ended(self, told: AnswerEnded) -> None:
        if (exchange := self._exchanges.pop(told.attempt, None)) is not None:
            exchange.client.relayed(told.num_reads, told.last)
            exchange.sink.on_end()

    def _broke(self, told: AnswerBroke) -> None:
        if (exchange := self._exchanges.pop(told.attempt, None)) is not None:
            exchange.broke(told)


class RemoteClient:
    """Client that is connected to a relay, and its request under way.

    Attributes:
        request: Number of the request under way; 0 for none.
    """

    __slots__ = ("_active", "_is_relayed", "_link", "_number", "can_go_on", "peer", "request")
    is_flushed = True

    def __init__(self, link: RelayLink, number: int, peer: Hashable) -> None:
        self._link, self._number, self.peer = link, number, peer
        self._active: ProxiedRequest | None = None
        self.request = 0
        self.can_go_on = True
        self._is_relayed = False

    def take(self, told: RequestArrived) -> None:
        """Give a whole request to the balancer."""
        balancer, message = self._link.balancer, RemoteRequest(told)
        self.request, self.can_go_on, self._is_relayed = told.request, told.can_go_on, False
        try:
            # Again: the settings may have changed since the relay has checked the head.
            balancer.check_head(self, message)
        except RequestRefusedError as error:
            balancer.refused(error)
            self.can_go_on = False
            again_s = error.retry_after_s
            self.write(replies.error(error.status, str(error), closes=True, retry_after_s=again_s))
            self.done(message)
            return
        active = balancer.take(self, message)
        # An immediate answer has ended the request already.
        if self.request:
            self._active = active

    def relaying(self, is_relayed: bool) -> None:
        """Record whether the relay has begun to relay an answer, and ends the request with it."""
        self._is_relayed = is_relayed

    def relayed(self, num_reads: int, last: bytes) -> None:
        """Count parts of the answer that the relay has relayed."""
        assert self._active is not None
        self._active.relayed(num_reads, last)

    def lost(self) -> None:
        """Learn that the connection has ended."""
        if self._active is not None:
            self._active.cancel()
        self._active, self.request = None, 0
        self._link.balancer.closed(self)

    def write(self, data: bytes) -> None:
        if not self._is_relayed:
            self._link.send(WriteAnswer(self.request, data))

    def end_with_body(self) -> None:
        self.can_go_on = False

    def done(self, message: ClientRequest) -> None:
        if not self._is_relayed:
            self._link.send(EndRequest(self.request, closes=not self.can_go_on))
        self._active, self.request = None, 0

    def abort(self) -> None:
        self._active = None
        # Otherwise the relay may have bytes of the last answer left, and ends with the balancer.
        if self.request:
            self._link.send(CloseClient(self._number, self.request))

    def evict(self) -> None:
        self._link.send(CloseClient(self._number))

    def exchange(
        self, pool: ConnectionPool, message: ClientRequest, fields: bytes, sink: Sink
    ) -> Exchange:
        return self._link.ask(self, pool.endpoint.url, fields, sink)

    def sweep(self, now_s: float) -> None:
        """Return at once: the relay enforces time limits."""

    def leave_if_idle(self) -> None:
        self.can_go_on = False


class RemoteRequest(ClientRequest):
    """Request of a client of a relay, which has the fields that only a server reads."""

    __slots__ = ()

    def __init__(self, told: RequestArrived) -> None:
        super().__init__()
        self.method, self.path, self.seen = told.method, told.path, told.seen
        if told.body:
            self.add_body(told.body, len(told.body))


class RemoteExchange:
    """Request that a relay sends to a server."""

    __slots__ = ("_body", "_link", "_number", "_request", "client", "sink")

    def __init__(self, link: RelayLink, number: int, client: RemoteClient, sink: Sink) -> None:
        self._link, self._number, self.client, self.sink = link, number, client, sink
        self._request = client.request
        self._body: _RemoteBody | None = None

    def began(self, told: AnswerBegan) -> None:
        """Learn that the answer has begun."""
        self.client.relaying(told.is_relayed)
        self._body = _RemoteBody(told.ends_by)
        head = ResponseHead(told.status, told.lines, self._body, True, told.is_events)
        self.sink.on_head(head, told.data)

    def broke(self, told: AnswerBroke) -> None:
        """Learn that there is no whole answer: the balancer decides how to go on."""
        self.client.relaying(False)
        if self._body is not None:
            self.client.relayed(told.num_reads, b"")
            self._body.at_boundary = told.at_boundary
        self.sink.on_broken(told.why, told.was_reused, told.is_ours)

    def end(self) -> None:
        self._link.forget(self._number)

    def drop(self) -> None:
        if self._link.forget(self._number):
            self._link.send(DropAttempt(self._request, self._number))

    def pause(self) -> None:
        """Return at once: the relay pauses an answer that its client reads slowly."""

    def resume(self) -> None:
        """Return at once, as ``pause`` does."""


class _RemoteBody:
    """Framing of a body that a relay reads."""

    __slots__ = ("at_boundary", "ends_by", "is_done")

    def __init__(self, ends_by: BodyEnd) -> None:
        self.ends_by = ends_by
        self.is_done = self.at_boundary = False

    def feed(self, data: bytes) -> int:
        """Return the size of ``data``, which the relay has checked."""
        return len(data)
