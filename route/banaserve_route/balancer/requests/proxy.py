"""Request under way: its target, attempts until one answers, and the answer to the client."""

from __future__ import annotations

import asyncio
from bisect import bisect_left
from collections import deque
from collections.abc import Callable, Hashable
from time import monotonic

from banaserve.base.errors import PolicyError
from banaserve_route.balancer.http import replies
from banaserve_route.balancer.http.client_connection import Client, write_error
from banaserve_route.balancer.http.replica_connection import Sink
from banaserve_route.balancer.http.request import ClientRequest
from banaserve_route.balancer.http.response import (
    NUM_LAST_PARTS,
    TAIL_BYTES,
    Body,
    BodyEnd,
    ResponseHead,
    is_comment,
)
from banaserve_route.balancer.requests.attempt import UpstreamAttempt
from banaserve_route.balancer.requests.dispatcher import Dispatcher
from banaserve_route.balancer.requests.hedging import HedgeEvent
from banaserve_route.balancer.requests.routing_request import stored_response
from banaserve_route.balancer.tenants import TenantUse
from banaserve_route.policies.interface import Flight, Request, RoutingDecision, RoutingReason

RETRIED = frozenset((429, 502, 503, 504))
"""Statuses after which another replica is tried: the replica is too busy, or not available."""

_BACKOFF_S = 0.1


class ProxiedRequest:
    """Request from its last byte to the last byte of its answer. It is answered exactly once.

    Attributes:
        flights: Records of the attempts, in their order.
        num_reads: Number of parts of the answer relayed.
        parent: W3C trace context for the next hop.
        status: Status of the answer; 0 before the answer, and if the client went away.
        tenant: Tenant that asks, if its use is counted; ``identity`` is its name for the next hop.
    """

    __slots__ = (
        "_attempt",
        "_backoff",
        "_body",
        "_client",
        "_dispatcher",
        "_had_free_try",
        "_hedge",
        "_holder_is_busy",
        "_is_events",
        "_is_silent",
        "_last",
        "_num_exceeded",
        "_on_ended",
        "_tried",
        "_why",
        "deadline_s",
        "flights",
        "identity",
        "is_over",
        "message",
        "num_attempts",
        "num_reads",
        "parent",
        "prompt_tokens",
        "request",
        "status",
        "tenant",
        "waits_until_s",
    )

    def __init__(
        self,
        dispatcher: Dispatcher,
        client: Client,
        message: ClientRequest,
        request: Request,
        deadline_s: float,
        on_ended: Callable[[ProxiedRequest], None],
    ) -> None:
        """``on_ended`` is called once, after the answer or when the client goes away."""
        self._dispatcher, self._client, self.message = dispatcher, client, message
        self.request, self._on_ended = request, on_ended
        self.deadline_s = self.waits_until_s = deadline_s
        self.is_over = False
        self.flights: list[Flight] = []
        self.num_attempts = self.num_reads = self.status = self._num_exceeded = 0
        self.parent = message.seen.get(b"traceparent", b"")
        self.tenant: TenantUse | None = None
        self.identity = ""
        self.prompt_tokens = request.num_tokens
        self._tried: set[str] = set()
        self._attempt: UpstreamAttempt | None = None
        self._backoff: asyncio.TimerHandle | None = None
        self._hedge: Hedge | None = None
        self._body: Body | None = None
        self._last: deque[bytes] = deque(maxlen=NUM_LAST_PARTS)
        self._why = ""
        self._is_events = self._is_silent = False
        self._had_free_try = self._holder_is_busy = False

    @property
    def num_tokens(self) -> int:
        """Return the known tokens of prompt and answer; 0 before a replica was asked."""
        if not self.flights:
            return 0
        answered = sum(flight.output_tokens for flight in self.flights)
        return self.prompt_tokens + (answered or self.num_reads)

    # Finding a target.

    def start(self) -> None:
        """Send the request, or let it wait in the queue."""
        limits = self._dispatcher.prompt_limits
        self._num_exceeded = bisect_left(limits, self.request.num_tokens)
        self._limit_wait()
        queue = self._dispatcher.queue
        is_first = self.message.is_preflight or not (queue and queue.has_waiting(self.kind))
        if is_first and self.place():
            return
        if len(queue) >= self._dispatcher.max_queue:
            self._answer(429, f"{len(queue)} requests wait already; try again shortly", 1.0)
            return
        queue.join(self)

    def place(self) -> bool:
        self.request = self._dispatcher.fleet.with_known_hits(self.request)
        try:
            decision = self._dispatcher.decide(self.request, self._tried)
        except PolicyError as failure:
            self._dispatcher.log(str(failure))
            self._answer(500, str(failure), None)
            return True
        if decision.target is not None:
            self._send(decision)
            return True
        if decision.reason is RoutingReason.NONE_MAY:
            model = f" with model {self.request.model}" if self.request.model else ""
            regions = self.request.allowed_regions
            where = f" in {', '.join(sorted(regions))}" if regions is not None else ""
            self._answer(503, f"no replica here may serve a request{model}{where}", None)
            return True
        if self.message.is_preflight:
            # It shows no key: strangers must not fill the queue.
            self.waited_too_long()
            return True
        return False

    def waited_too_long(self) -> None:
        self._answer(503, self._why or "no replica was up and free in time; try again shortly", 2.0)

    def _send(self, decision: RoutingDecision) -> None:
        attempt = self._attempt = self._begin(decision, self)
        hedger = self._dispatcher.hedger
        if hedger is not None and len(self.flights) == 1 and not attempt.target.is_peer:
            delay_s = hedger.delay_s(self.message, attempt.flight)
            if delay_s is not None:
                self._hedge = Hedge(self, delay_s)

    def _begin(self, decision: RoutingDecision, sink: Sink) -> UpstreamAttempt:
        dispatcher, message = self._dispatcher, self.message
        attempt = UpstreamAttempt(dispatcher, self.request, decision)
        if not self.flights:
            attempt.target.num_decisions[decision.reason] += 1
        self.flights.append(attempt.flight)
        self.num_attempts += 1
        fields = dispatcher.fields(
            attempt.target, message, self.request, self.parent, self.identity
        )
        attempt.exchange = self._client.exchange(attempt.target.pool, message, fields, sink)
        return attempt

    # A second attempt beside the first one.

    def hedge(self, hedge: Hedge) -> None:
        """Begin the second attempt of ``hedge``, if one is allowed now."""
        first, dispatcher = self._attempt, self._dispatcher
        if first is None or self.num_attempts >= dispatcher.max_attempts:
            return
        tried = {*self._tried, first.target.view.id}
        try:
            decision = dispatcher.decide_hedge(self.request, tried, first.target)
        except PolicyError as failure:
            dispatcher.log(str(failure))
            return
        if isinstance(decision, RoutingDecision):
            hedge.attempt = self._begin(decision, hedge)
            decision = HedgeEvent.SENT
        dispatcher.count_hedge(decision)

    def hedge_again(self, hedge: Hedge, failed: UpstreamAttempt) -> None:
        """Try a third replica after the second attempt has failed, while the first one is late."""
        self._tried.add(failed.target.view.id)
        self.hedge(hedge)

    def use_second(self) -> None:
        """Use the second attempt, whose answer begins before the first one's."""
        first, hedge = self._attempt, self._hedge
        assert first is not None
        assert hedge is not None
        self._attempt = hedge.take()
        first.broke(is_fault=False)
        self._dispatcher.count_hedge(HedgeEvent.WON)

    def _has_second(self) -> bool:
        """Go on with the second attempt if there is one, since the first one has failed."""
        hedge = self._hedge
        if hedge is None or hedge.attempt is None:
            return False
        self._attempt = hedge.take()
        self._dispatcher.count_hedge(HedgeEvent.WON)
        # The old one remains the sink of this attempt, and would take its answer for a third one's.
        self._hedge = Hedge(self, hedge.delay_s)
        return True

    def _end_hedge(self) -> None:
        hedge, self._hedge = self._hedge, None
        if hedge is not None:
            hedge.end()

    def failed(self, attempt: UpstreamAttempt, why: str, is_fault: bool) -> None:
        """Record that an attempt ended before an answer had begun, by its target's fault or not."""
        attempt.broke(is_fault)
        self._why = f"{attempt.target.name}: {why}"
        if is_fault:
            self._dispatcher.log(self._why)

    # The answer, from the replica's connection.

    def on_head(self, head: ResponseHead, data: bytes) -> None:
        client, attempt = self._client, self._attempt
        assert attempt is not None
        status, body, now_s = head.status, head.body, monotonic()
        if status in RETRIED and self._may_go_on(attempt):
            attempt.drop()
            attempt.answered(status, now_s)
            self._attempt = None
            self._why = f"{attempt.target.name} answered {status}"
            self._holder_is_busy = True
            self._again(attempt)
            return
        if status == 404 and self._looks_on(attempt, now_s):
            return
        if self._hedge is not None:
            self._end_hedge()
        self.status, self._body = status, body
        self._last.append(data[-TAIL_BYTES:])
        self._is_events = head.is_events
        self._is_silent = head.is_events and is_comment(data)
        if not self._is_silent:
            attempt.first_byte(now_s)
        if body.ends_by is BodyEnd.CLOSE:
            client.end_with_body()
        client.write(head.to_client(data, closes=not client.can_go_on))

    def on_body(self, data: bytes) -> None:
        self.num_reads += 1
        self._last.append(data[-TAIL_BYTES:])
        self._client.write(data)
        if self._is_silent and not is_comment(data) and self._attempt is not None:
            self._is_silent = False
            self._attempt.first_byte(monotonic())

    def relayed(self, num_reads: int, last: bytes) -> None:
        """Count parts of the answer that a relay has relayed; ``last`` is the end of the answer."""
        self.num_reads += num_reads
        self._last.append(last)

    def on_end(self) -> None:
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        attempt.answered(self.status, monotonic(), b"".join(self._last), self.num_reads)
        self.prompt_tokens = attempt.prompt_tokens or self.prompt_tokens
        self._end(self.status)

    def on_broken(self, why: str, was_reused: bool, is_ours: bool = False) -> None:
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        if was_reused:
            # The server closed the connection while it was idle; all other idle ones may be closed.
            attempt.target.pool.drop_idle()
        if self.status:
            self._break_off(attempt, why)
        elif self._has_second():
            self._tried.add(attempt.target.view.id)
            self.failed(attempt, why, is_fault=not (was_reused or is_ours))
        elif was_reused and not self._had_free_try:
            self._had_free_try = True
            attempt.broke(is_fault=False)
            self.num_attempts -= 1
            self._rejoin()
        elif is_ours:
            self._lack(attempt, why)
        else:
            self.failed(attempt, why, is_fault=not was_reused)
            if self.num_attempts < self._dispatcher.max_attempts:
                self._again(attempt)
            else:
                self._answer(502, f"{self._why}, after {self.num_attempts} attempts", 1.0)

    # Another attempt.

    def _looks_on(self, attempt: UpstreamAttempt, now_s: float) -> bool:
        """Ask the next replica for a stored response, held by one of them; False at the last."""
        if not (response_id := stored_response(self.message)):
            return False
        tried = {*self._tried, attempt.target.view.id}
        if not self._why and not self._dispatcher.others(self.request, tried):
            return False
        self._tried = tried
        attempt.drop()
        attempt.answered(404, now_s)
        self._attempt = None
        self.num_attempts -= 1
        is_left = any(one.view.is_available for one in self._dispatcher.others(self.request, tried))
        if not is_left or not self.place():
            self._not_found(response_id)
        return True

    def _not_found(self, response_id: str) -> None:
        """Answer that none of the replicas that could be asked holds a stored response."""
        unasked = self._dispatcher.others(self.request, self._tried)
        why = self._why or f"{unasked[0].name} cannot be asked"
        is_busy = self._holder_is_busy or any(one.is_full for one in unasked)
        what = "and may hold it: try again shortly" if is_busy else "and what it held may be lost"
        words = f"no replica that could be asked holds the response {response_id!r}; {why}, {what}"
        self._answer(503 if is_busy else 404, words, 1.0 if is_busy else None)

    def _lack(self, attempt: UpstreamAttempt, why: str) -> None:
        """Retry later: this process lacks a descriptor, which is not the replica's fault."""
        attempt.broke(is_fault=False)
        self._why = f"the balancer {why}; try again shortly"
        self._dispatcher.make_room(why)
        if self.num_attempts < self._dispatcher.max_attempts:
            self._pause()
        else:
            self._answer(503, self._why, 1.0)

    def _pause(self) -> None:
        pause_s = _BACKOFF_S * 2**self.num_attempts
        self._backoff = asyncio.get_running_loop().call_later(pause_s, self._rejoin)

    def _may_go_on(self, attempt: UpstreamAttempt) -> bool:
        if self._hedge is not None and self._hedge.attempt is not None:
            return True
        tried = {*self._tried, attempt.target.view.id}
        is_left = self.num_attempts < self._dispatcher.max_attempts
        return is_left and self._dispatcher.has_other(self.request, tried)

    def _again(self, attempt: UpstreamAttempt) -> None:
        attempt.target.num_retried += 1
        self._tried.add(attempt.target.view.id)
        if self._has_second():
            return
        if self._dispatcher.has_other(self.request, self._tried):
            self._rejoin()
            return
        if response_id := stored_response(self.message):
            self._not_found(response_id)
            return
        if self._dispatcher.has_alive(self.request, self._tried):
            # Its next attempts would all meet the same dead replica before probes notice the death.
            self._rejoin()
            return
        self._tried.clear()
        self._pause()

    @property
    def kind(self) -> Hashable:
        request = self.request
        # One that waits for a full target must not hold up others, which may go to the tried ones,
        # nor a long prompt short ones, which may go to replicas with a limit.
        who = request.model, request.allowed_regions, request.was_forwarded
        return *who, self._num_exceeded, frozenset(self._tried)

    def _rejoin(self) -> None:
        self._backoff = None
        self._limit_wait()
        if not self.is_over and not self.place():
            self._dispatcher.queue.join(self, at_front=True)

    def _limit_wait(self) -> None:
        """Set the time limit of a wait that begins now: attempts before it do not count."""
        until_s = monotonic() + self._dispatcher.queue_timeout_s
        self.waits_until_s = min(until_s, self.deadline_s)

    # Ends.

    def _break_off(self, attempt: UpstreamAttempt, why: str) -> None:
        """End an answer that has begun, since it cannot be begun again at another replica."""
        client, body = self._client, self._body
        attempt.broke(is_fault=True)
        self._dispatcher.log(f"{attempt.target.name}: {why} in mid-answer")
        self.is_over, self.status = True, 502
        if self._is_events and body is not None and body.at_boundary:
            client.can_go_on = False
            client.write(replies.error_event(f"{attempt.target.name}: {why}"))
            client.done(self.message)
        else:
            client.abort()
        self._on_ended(self)

    def _answer(self, status: int, why: str, retry_after_s: float | None) -> None:
        """Answer without a replica."""
        write_error(self._client, self.message, status, why, retry_after_s)
        self._end(status)

    def _end(self, status: int) -> None:
        if self._hedge is not None:
            self._end_hedge()
        self.is_over, self.status = True, status
        self._client.done(self.message)
        self._on_ended(self)

    def expire(self) -> None:
        """End a request that has run out of time."""
        self._release()
        if self.status:
            self.is_over, self.status = True, 504
            self._client.abort()
            self._on_ended(self)
        else:
            self._answer(504, "the request ran out of time", None)

    def cancel(self) -> None:
        if self.is_over:
            return
        self.is_over, self.status = True, 0
        self._release()
        self._on_ended(self)

    def _release(self) -> None:
        """Give up the attempt under way, or the place in the queue."""
        self._dispatcher.queue.leave(self)
        if self._backoff is not None:
            self._backoff.cancel()
        if self._hedge is not None:
            self._end_hedge()
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.broke(is_fault=False)

    def pause(self) -> None:
        if self._attempt is not None:
            self._attempt.pause()

    def resume(self) -> None:
        if self._attempt is not None:
            self._attempt.resume()


class Hedge:
    """Second attempt of a request whose first token is late, and the sink of its answer.

    The answer that begins first is used, unless it is an error; the other attempt is cancelled.

    Attributes:
        attempt: Second attempt while it is not known which one is used; None before and after.
        delay_s: Time after which the first token of the request is late.
    """

    __slots__ = ("_request", "_timer", "attempt", "delay_s")

    def __init__(self, request: ProxiedRequest, delay_s: float) -> None:
        self._request, self.delay_s = request, delay_s
        self.attempt: UpstreamAttempt | None = None
        self._timer = asyncio.get_running_loop().call_later(delay_s, request.hedge, self)

    def take(self) -> UpstreamAttempt | None:
        """Return the second attempt, to be used or ended; None if there is none."""
        attempt, self.attempt = self.attempt, None
        return attempt

    def end(self) -> None:
        """Cancel the second attempt, under way or to come."""
        self._timer.cancel()
        if (attempt := self.take()) is not None:
            attempt.broke(is_fault=False)

    def on_head(self, head: ResponseHead, data: bytes) -> None:
        if self.attempt is None:
            self._request.on_head(head, data)
        elif head.status < 400:
            self._request.use_second()
            self._request.on_head(head, data)
        elif (attempt := self.take()) is not None:
            attempt.drop()
            attempt.answered(head.status, monotonic())
            if head.status in RETRIED:
                self._request.hedge_again(self, attempt)

    def on_body(self, data: bytes) -> None:
        self._request.on_body(data)

    def on_end(self) -> None:
        self._request.on_end()

    def on_broken(self, why: str, was_reused: bool, is_ours: bool = False) -> None:
        attempt = self.take()
        if attempt is None:
            self._request.on_broken(why, was_reused, is_ours)
            return
        self._request.failed(attempt, why, is_fault=not (was_reused or is_ours))
        self._request.hedge_again(self, attempt)
