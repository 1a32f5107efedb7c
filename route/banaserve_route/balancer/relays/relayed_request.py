"""Request under way in a relay: its bytes to servers, and the answer to the client."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable

from banaserve_route.balancer.http import replies
from banaserve_route.balancer.http.client_connection import ClientConnection
from banaserve_route.balancer.http.exchange import ReplicaExchange
from banaserve_route.balancer.http.replica_connection import ConnectionPool
from banaserve_route.balancer.http.request import ClientRequest
from banaserve_route.balancer.http.response import (
    NUM_LAST_PARTS,
    TAIL_BYTES,
    Body,
    BodyEnd,
    ResponseHead,
    is_comment,
)
from banaserve_route.balancer.relays.messages import (
    AnswerBegan,
    AnswerBroke,
    AnswerEnded,
    DropAttempt,
    EndRequest,
    SendRequest,
    ToBalancer,
    WriteAnswer,
)
from banaserve_route.balancer.relays.server_pools import ServerPools


class RelayedRequest:
    """Request of a client from its last byte to the last byte of its answer.

    The balancer says where the request is sent and what becomes of errors. The first answer that
    begins without an error is relayed at once, since that is what the balancer would say: a stream
    does not wait for another process.

    Attributes:
        number: Number of the request in messages.
    """

    __slots__ = (
        "_asked",
        "_attempts",
        "_client",
        "_is_alone",
        "_message",
        "_on_ended",
        "_pools",
        "_relayed",
        "_send",
        "number",
    )  # fmt: skip

    def __init__(
        self,
        number: int,
        client: ClientConnection,
        message: ClientRequest,
        pools: ServerPools,
        send: Callable[[ToBalancer], None],
        on_ended: Callable[[int], object],
    ) -> None:
        """
        Args:
            send: Function that sends a message to the balancer.
            on_ended: Function that is called once, with the number of the request: further
                messages about it are to be ignored.
        """
        self.number, self._client, self._message = number, client, message
        self._pools, self._send, self._on_ended = pools, send, on_ended
        self._attempts: dict[int, _Attempt] = {}
        # Attempts whose answers, complete or not, the balancer may take.
        self._asked: set[int] = set()
        self._relayed: _Attempt | None = None
        self._is_alone = False

    # From the balancer.

    def take(self, told: SendRequest | DropAttempt | WriteAnswer | EndRequest) -> None:
        """Do what the balancer says."""
        match told:
            case SendRequest():
                self._attempt(told)
            case DropAttempt():
                self._drop(told.attempt)
            case WriteAnswer():
                self._write(told.data)
            case EndRequest():
                self._end(told.closes)

    def _attempt(self, told: SendRequest) -> None:
        """Send the request to a server, unless an answer has begun meanwhile."""
        if self._relayed is None:
            pool = self._pools.of(told.url)
            made = self._attempts[told.attempt] = _Attempt(
                self, told.attempt, pool, self._client.write
            )
            made.exchange = ReplicaExchange(pool, self._message, told.fields, made)

    def _drop(self, number: int) -> None:
        """Drop an attempt; if its answer has begun, the client must not take it for a whole one."""
        self._asked.discard(number)
        attempt = self._attempts.pop(number, None)
        if attempt is None:
            return
        attempt.exchange.drop()
        if attempt is self._relayed:
            self._client.reset()

    def _write(self, data: bytes) -> None:
        """Write to the client, and relay the rest of the answer that has begun, if there is one."""
        for attempt in self._attempts.values():
            if attempt.body is not None:
                self._relayed = attempt
                if attempt.body.ends_by is BodyEnd.CLOSE:
                    self._client.end_with_body()
                attempt.exchange.resume()
        self._client.write(data)

    def _end(self, closes: bool) -> None:
        """Finish the request, whose answer is complete."""
        self._on_ended(self.number)
        if closes:
            self._client.can_go_on = False
        self._client.done(self._message)

    def give_up(self) -> None:
        """Go on without the balancer, which has ended; answer so if no answer has begun."""
        self._is_alone = True
        if self._relayed is None:
            self._drop_all()
            words = "the balancer has ended; try again shortly"
            self._write(replies.error(503, words, closes=True, retry_after_s=1.0))
            self._end(closes=True)
        elif self._relayed.number not in self._attempts:
            # The balancer has not said how the client learns of the end.
            self._client.reset()

    # From the client.

    def cancel(self) -> None:
        self._on_ended(self.number)
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
        told = attempt.number, head.status, head.body.ends_by, head.is_events
        if not self._is_for_client(head):
            attempt.exchange.pause()
            self._asked.add(attempt.number)
            self._send(AnswerBegan(*told, False, head.lines, data))
            return
        del self._attempts[attempt.number]
        self._drop_all()
        self._attempts[attempt.number] = self._relayed = attempt
        attempt.is_finished_here = True
        if head.body.ends_by is BodyEnd.CLOSE:
            self._client.end_with_body()
        attempt.is_silent = head.is_events and is_comment(data)
        attempt.began = AnswerBegan(*told, True)
        self._send(AnswerBegan(*told, True, data=data) if attempt.is_silent else attempt.began)
        self._client.write(head.to_client(data, closes=not self._client.can_go_on))

    def spoke(self, attempt: _Attempt) -> None:
        """Tell of the first event of a stream that began with comments."""
        self._send(attempt.began)

    def _is_for_client(self, head: ResponseHead) -> bool:
        """Return whether the balancer would relay this answer, whatever it does at this moment."""
        if head.status >= 400:
            return False
        # The balancer may be taking the answer to another attempt, which it has been told of.
        return not self._asked

    def ended(self, attempt: _Attempt, num_reads: int, last: bytes) -> None:
        """Finish a relayed request, whose answer is complete."""
        del self._attempts[attempt.number]
        attempt.exchange.end()
        self._send(AnswerEnded(attempt.number, num_reads, last))
        if attempt.is_finished_here or self._is_alone:
            self._end(closes=False)

    def broke(self, attempt: _Attempt, told: AnswerBroke) -> None:
        """Ask the balancer how to go on without a whole answer."""
        del self._attempts[attempt.number]
        attempt.exchange.drop()
        if told.is_ours:
            self._pools.drop_idle()
        self._send(told)
        if self._is_alone:
            self._client.reset()


class _Attempt:
    """Attempt at one server, and the sink of its answer."""

    __slots__ = (
        "_last",
        "_num_reads",
        "_pool",
        "_request",
        "_write",
        "began",
        "body",
        "exchange",
        "is_finished_here",
        "is_silent",
        "number",
    )  # fmt: skip
    began: AnswerBegan
    exchange: ReplicaExchange

    def __init__(
        self,
        request: RelayedRequest,
        number: int,
        pool: ConnectionPool,
        write: Callable[[bytes], None],
    ) -> None:
        self._request, self.number, self._pool = request, number, pool
        self._write = write
        self.body: Body | None = None
        self.is_finished_here = self.is_silent = False
        self._num_reads = 0
        self._last: deque[bytes] = deque(maxlen=NUM_LAST_PARTS)

    def on_head(self, head: ResponseHead, data: bytes) -> None:
        self.body = head.body
        self._last.append(data[-TAIL_BYTES:])
        self._request.began(self, head, data)

    def on_body(self, data: bytes) -> None:
        self._num_reads += 1
        self._last.append(data[-TAIL_BYTES:])
        self._write(data)
        if self.is_silent and not is_comment(data):
            self.is_silent = False
            self._request.spoke(self)

    def on_end(self) -> None:
        self._request.ended(self, self._num_reads, b"".join(self._last)[-TAIL_BYTES:])

    def on_broken(self, why: str, was_reused: bool, is_ours: bool = False) -> None:
        if was_reused:
            # The server closed the connection while it was idle; all other idle ones may be closed.
            self._pool.drop_idle()
        at_boundary = self.body is not None and self.body.at_boundary
        broke = AnswerBroke(self.number, self._num_reads, why, was_reused, is_ours, at_boundary)
        self._request.broke(self, broke)
