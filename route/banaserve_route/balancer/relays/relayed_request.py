"""Request under way in a relay: its bytes to servers, and the answer to the client."""

from __future__ import annotations

from typing import Protocol

from banaserve_route.balancer.http import replies
from banaserve_route.balancer.http.client_connection import ClientConnection
from banaserve_route.balancer.http.exchange import ReplicaExchange
from banaserve_route.balancer.http.replica_connection import ConnectionPool
from banaserve_route.balancer.http.request import ClientRequest
from banaserve_route.balancer.http.response import Body, BodyEnd, ResponseHead
from banaserve_route.balancer.relays.messages import (
    AnswerBegan,
    AnswerBroke,
    AnswerEnded,
    SendRequest,
    ToBalancer,
)


class RelayDesk(Protocol):
    """Relay as its requests see it."""

    def send(self, message: ToBalancer) -> None:
        """Send a message to the balancer."""
        ...

    def pool(self, url: str) -> ConnectionPool:
        """Return the connections to a server."""
        ...

    def forget(self, request: int) -> None:
        """Ignore further messages about a request."""
        ...

    def drop_idle(self) -> None:
        """Close idle connections to servers, since there are too few descriptors."""
        ...


class RelayedRequest:
    """Request of a client from its last byte to the last byte of its answer.

    The balancer says where the request is sent and what becomes of errors. The first answer that
    begins without an error is relayed at once, since that is what the balancer would say: a stream
    does not wait for another process.

    Attributes:
        number: Number of the request in messages.
    """

    __slots__ = ("_attempts", "_client", "_desk", "_message", "_relayed", "number")

    def __init__(
        self, desk: RelayDesk, number: int, client: ClientConnection, message: ClientRequest
    ) -> None:
        self._desk, self.number = desk, number
        self._client, self._message = client, message
        self._attempts: dict[int, _Attempt] = {}
        self._relayed: _Attempt | None = None

    # From the balancer.

    def attempt(self, told: SendRequest) -> None:
        """Send the request to a server, unless an answer has begun meanwhile."""
        if self._relayed is None:
            pool, is_head = self._desk.pool(told.url), self._message.method == b"HEAD"
            made = self._attempts[told.attempt] = _Attempt(self, told.attempt, pool)
            made.exchange = ReplicaExchange(pool, self._message.parts(told.fields), made, is_head)

    def drop(self, number: int) -> None:
        """Drop an attempt; if its answer has begun, the client must not take it for a whole one."""
        attempt = self._attempts.pop(number, None)
        if attempt is None:
            return
        attempt.exchange.drop()
        if attempt is self._relayed:
            self._client.evict()

    def write(self, data: bytes) -> None:
        """Write to the client, and relay the rest of the answer that has begun, if there is one."""
        for attempt in self._attempts.values():
            if attempt.body is not None:
                self._relayed = attempt
                attempt.exchange.resume()
        self._client.write(data)

    def end(self, closes: bool) -> None:
        """Finish the request, whose answer is complete."""
        self._desk.forget(self.number)
        if closes:
            self._client.can_go_on = False
        self._client.done(self._message)

    def give_up(self) -> None:
        """Answer that the balancer has ended, if no answer has begun."""
        if self._relayed is None:
            self._drop_all()
            words = "the balancer has ended; try again shortly"
            self.write(replies.error(503, words, closes=True, retry_after_s=1.0))
            self.end(closes=True)

    # From the client.

    def cancel(self) -> None:
        self._desk.forget(self.number)
        self._drop_all()

    def pause(self) -> None:
        if self._relayed is not None:
            self._relayed.exchange.pause()

    def resume(self) -> None:
        if self._relayed is not None:
            self._relayed.exchange.resume()

    def _drop_all(self) -> None:
        while self._attempts:
            self._attempts.popitem()[1].exchange.drop()

    # From the attempts.

    def began(self, attempt: _Attempt, head: ResponseHead, data: bytes) -> None:
        """Relay the beginning of an answer, or ask the balancer what becomes of it."""
        ends_by, client = head.body.ends_by, self._client
        is_unreadable = self._message.is_http10 and ends_by is BodyEnd.LAST_CHUNK
        if head.status >= 400 or is_unreadable:
            attempt.exchange.pause()
            self._desk.send(
                AnswerBegan(
                    attempt.number, head.status, ends_by, head.is_events, False, head.lines, data
                )
            )
            return
        del self._attempts[attempt.number]
        self._drop_all()
        self._attempts[attempt.number] = self._relayed = attempt
        if ends_by is BodyEnd.CLOSE:
            client.can_go_on = False
        self._desk.send(AnswerBegan(attempt.number, head.status, ends_by, head.is_events, True))
        attempt.is_finished_here = True
        client.write(head.to_client(data, closes=not client.can_go_on))

    def relay(self, data: bytes) -> None:
        """Relay a part of the answer."""
        self._client.write(data)

    def ended(self, attempt: _Attempt, num_reads: int, last: bytes) -> None:
        """Finish a relayed request, whose answer is complete."""
        del self._attempts[attempt.number]
        attempt.exchange.end()
        self._desk.send(AnswerEnded(attempt.number, num_reads, last))
        if attempt.is_finished_here:
            self.end(closes=False)

    def broke(self, attempt: _Attempt, told: AnswerBroke) -> None:
        """Ask the balancer how to go on without a whole answer."""
        del self._attempts[attempt.number]
        attempt.exchange.drop()
        if told.is_ours:
            self._desk.drop_idle()
        self._desk.send(told)


class _Attempt:
    """Attempt at one server, and the sink of its answer."""

    __slots__ = (
        "_last",
        "_num_reads",
        "_pool",
        "_request",
        "body",
        "exchange",
        "is_finished_here",
        "number",
    )  # fmt: skip
    exchange: ReplicaExchange

    def __init__(self, request: RelayedRequest, number: int, pool: ConnectionPool) -> None:
        self._request, self.number, self._pool = request, number, pool
        self.body: Body | None = None
        self.is_finished_here = False
        self._num_reads = 0
        self._last = b""

    def on_head(self, head: ResponseHead, data: bytes) -> None:
        self.body, self._last = head.body, data
        self._request.began(self, head, data)

    def on_body(self, data: bytes) -> None:
        self._num_reads += 1
        self._last = data
        self._request.relay(data)

    def on_end(self) -> None:
        self._request.ended(self, self._num_reads, self._last)

    def on_broken(self, why: str, was_reused: bool, is_ours: bool = False) -> None:
        if was_reused:
            # The server closed the connection while it was idle; all other idle ones may be closed.
            self._pool.drop_idle()
        at_boundary = self.body is not None and self.body.at_boundary
        broke = AnswerBroke(self.number, self._num_reads, why, was_reused, is_ours, at_boundary)
        self._request.broke(self, broke)
