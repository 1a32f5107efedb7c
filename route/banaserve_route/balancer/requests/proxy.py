"""Request under way: its target, attempts until one answers, and the answer to the client."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Hashable
from time import monotonic

from banaserve.base.errors import PolicyError
from banaserve.base.net.sockets import is_own_fault
from banaserve_route.balancer.http import replies
from banaserve_route.balancer.http.client_connection import ClientConnection
from banaserve_route.balancer.http.replica_connection import ReplicaConnection, Sink
from banaserve_route.balancer.http.request import ClientRequest
from banaserve_route.balancer.http.response import Body, ChunkedBody, ResponseHead, UntilClose
from banaserve_route.balancer.requests.dispatcher import Dispatcher
from banaserve_route.balancer.requests.routing_request import stored_response
from banaserve_route.balancer.tenants import TenantUse
from banaserve_route.policies.interface import Flight, Request, RoutingDecision, RoutingReason

FAULTS = frozenset((502, 503, 504))
"""Statuses that count as the replica's fault. Not 500: one bad request would open every circuit."""

RETRIED = frozenset((429, 502, 503, 504))
"""Statuses after which another replica is tried: the replica is too busy, or not available."""

_BACKOFF_S = 0.1
_USAGE = re.compile(rb'"(completion_tokens|cached_tokens|prompt_tokens)"\s*:\s*(\d{1,9})')
_TAIL_BYTES = 4096


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
        "_holder_is_busy",
        "_is_events",
        "_last",
        "_on_ended",
        "_tried",
        "_why",
        "deadline_s",
        "flights",
        "identity",
        "is_over",
        "kind",
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
        client: ClientConnection,
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
        self.num_attempts = self.num_reads = self.status = 0
        self.parent = message.seen.get(b"traceparent", b"")
        self.tenant: TenantUse | None = None
        self.identity = ""
        self.prompt_tokens = request.num_tokens
        self._tried: set[str] = set()
        self.kind = self._kind()
        self._attempt: UpstreamAttempt | None = None
        self._backoff: asyncio.TimerHandle | None = None
        self._body: Body | None = None
        self._last = b""
        self._why = ""
        self._is_events = self._had_free_try = self._holder_is_busy = False

    @property
    def num_tokens(self) -> int:
        """Return the known tokens of prompt and answer; 0 before a replica was asked."""
        if not self.flights:
            return 0
        return self.prompt_tokens + (self.flights[-1].output_tokens or self.num_reads)

    # Finding a target.

    def start(self, waits_until_s: float) -> None:
        """Send the request, or let it wait in the queue."""
        self.waits_until_s = min(waits_until_s, self.deadline_s)
        queue = self._dispatcher.queue
        if not queue.has_waiting(self.kind) and self.place():
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
        return False

    def waited_too_long(self) -> None:
        self._answer(503, self._why or "no replica became free in time; try again shortly", 2.0)

    def _send(self, decision: RoutingDecision) -> None:
        dispatcher, message = self._dispatcher, self.message
        attempt = self._attempt = UpstreamAttempt(dispatcher, self.request, decision)
        self.flights.append(attempt.flight)
        self.num_attempts += 1
        fields = dispatcher.fields(
            attempt.target, message, self.request, self.parent, self.identity
        )
        attempt.start(message.parts(fields), self, message.method == b"HEAD")

    # The answer, from the replica's connection.

    def on_head(self, head: ResponseHead, data: bytes) -> None:
        client, attempt = self._client, self._attempt
        assert attempt is not None
        status, body, now_s = head.status, head.body, monotonic()
        if status in RETRIED and self._may_go_on(attempt):
            attempt.drop()
            attempt.answered(status, now_s)
            self._why = f"{attempt.target.name} answered {status}"
            self._holder_is_busy = True
            self._again(attempt)
            return
        if status == 404 and self._looks_on(attempt, now_s):
            return
        if self.message.is_http10 and isinstance(body, ChunkedBody):
            # uvicorn sends chunks in either version of HTTP: this is not the replica's fault.
            self._release()
            self._answer(505, "the answer comes in chunks: ask by HTTP/1.1", None)
            return
        self.status, self._body, self._last = status, body, data
        attempt.first_byte(now_s)
        self._is_events = head.is_events
        if isinstance(body, UntilClose):
            client.can_go_on = False
        if client.can_go_on:
            client.write(b"%b\r\n%b" % (head.lines, data))
        else:
            client.write(b"%bConnection: close\r\n\r\n%b" % (head.lines, data))

    def on_body(self, data: bytes) -> None:
        self.num_reads += 1
        self._last = data
        self._client.write(data)

    def on_end(self) -> None:
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        attempt.answered(self.status, monotonic(), self._last, self.num_reads)
        self.prompt_tokens = attempt.prompt_tokens or self.prompt_tokens
        self._end(self.status)

    def on_broken(self, why: str, was_reused: bool, is_ours: bool = False) -> None:
        attempt, self._attempt = self._attempt, None
        assert attempt is not None
        if self.status:
            self._break_off(attempt, why)
        elif was_reused and not self._had_free_try:
            self._had_free_try = True
            attempt.broke(is_fault=False)
            # The server closed the connection while it was idle; all other idle ones may be closed.
            attempt.target.pool.drop_idle()
            self.num_attempts -= 1
            self._rejoin()
        elif is_ours:
            self._lack(attempt, why)
        else:
            attempt.broke(is_fault=True)
            self._why = f"{attempt.target.name}: {why}"
            self._dispatcher.log(self._why)
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
        tried = {*self._tried, attempt.target.view.id}
        is_left = self.num_attempts < self._dispatcher.max_attempts
        return is_left and self._dispatcher.has_other(self.request, tried)

    def _again(self, attempt: UpstreamAttempt) -> None:
        attempt.target.num_retried += 1
        self._tried.add(attempt.target.view.id)
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

    def _kind(self) -> Hashable:
        request = self.request
        tried = frozenset(self._tried)
        return request.model, request.allowed_regions, request.was_forwarded, tried

    def _rejoin(self) -> None:
        self._backoff = None
        # One that waits for a full target must not hold up others, which may go to the tried ones.
        self.kind = self._kind()
        if not self.is_over and not self.place():
            self._dispatcher.queue.join(self, at_front=True)

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
        client = self._client
        if self.message.method == b"HEAD":
            # The answer to HEAD must not have the body sent here, so the connection must end.
            client.can_go_on = False
        closes = not client.can_go_on
        client.write(replies.error(status, why, closes=closes, retry_after_s=retry_after_s))
        self._end(status)

    def _end(self, status: int) -> None:
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
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.broke(is_fault=False)

    def pause(self) -> None:
        if self._attempt is not None:
            self._attempt.pause()

    def resume(self) -> None:
        if self._attempt is not None:
            self._attempt.resume()


class UpstreamAttempt:
    """Attempt at one target, counted as sent when it is created, and as ended exactly once.

    Attributes:
        flight: Record of the attempt for the policy.
        prompt_tokens: Number of prompt tokens that the answer states; 0 if it states none.
    """

    __slots__ = (
        "_connecting",
        "_dispatcher",
        "_upstream",
        "flight",
        "is_over",
        "prompt_tokens",
        "target",
    )

    def __init__(self, dispatcher: Dispatcher, request: Request, decision: RoutingDecision) -> None:
        """``decision`` must have a target."""
        now_s = monotonic()
        self._dispatcher = dispatcher
        self._upstream: ReplicaConnection | None = None
        self._connecting: asyncio.Task[None] | None = None
        self.is_over = False
        self.prompt_tokens = 0
        self.target = dispatcher.target(decision)
        self.flight = dispatcher.fleet.sent(request, decision, now_s)
        self.target.sent(now_s)

    def start(self, parts: list[bytes], sink: Sink, to_head: bool) -> None:
        """Send the request, on an idle connection or on a new one."""
        upstream = self.target.pool.take()
        if upstream is not None:
            self._upstream = upstream
            upstream.send(parts, sink, to_head)
            return
        connecting = self._connect(parts, sink, to_head)
        self._connecting = asyncio.get_running_loop().create_task(connecting)

    async def _connect(self, parts: list[bytes], sink: Sink, to_head: bool) -> None:
        try:
            upstream = await self.target.pool.connect()
        except OSError as error:
            if not self.is_over:
                why = "timed out" if isinstance(error, TimeoutError) else error.strerror or "failed"
                why, is_ours = f"cannot connect ({why.lower()})", is_own_fault(error)
                sink.on_broken(why, was_reused=False, is_ours=is_ours)
            return
        if self.is_over:
            self.target.pool.give_back(upstream)
        else:
            self._upstream = upstream
            upstream.send(parts, sink, to_head)

    def first_byte(self, now_s: float) -> None:
        """Record that the answer has begun."""
        self._dispatcher.fleet.first_token(self.flight, now_s)

    def answered(self, status: int, now_s: float, last: bytes = b"", num_reads: int = 0) -> None:
        """Record that the answer is complete, or that another attempt follows.

        Args:
            last: Last bytes of the answer, which may state its number of tokens.
            num_reads: Number of parts of the answer: about one per token of a stream.
        """
        self._end()
        if status >= 400:
            self._dispatcher.fleet.failed(self.flight, now_s, is_fault=status in FAULTS)
        else:
            usage = dict(_USAGE.findall(last[-_TAIL_BYTES:]))
            cached = usage.get(b"cached_tokens")
            tokens = int(usage.get(b"completion_tokens", num_reads))
            cached_tokens = None if cached is None else int(cached)
            self.prompt_tokens = int(usage.get(b"prompt_tokens", 0))
            self._dispatcher.fleet.finished(self.flight, now_s, tokens, cached_tokens)
        # Last: the target is full or not by the requests that the fleet still counts there.
        self.target.answered(status, status in FAULTS, now_s)
        self.target.record(self.flight, status, now_s)

    def broke(self, is_fault: bool) -> None:
        """Record that the answer will not be complete, and close the attempt's connection.

        Args:
            is_fault: True if the target is at fault, and not, say, a client that went away.
        """
        now_s = monotonic()
        self._dispatcher.fleet.failed(self.flight, now_s, is_fault)
        self.target.broke(is_fault, now_s)
        self.target.record(self.flight, 502 if is_fault else 0, now_s)
        self.drop()

    def drop(self) -> None:
        """Close the connection: its further bytes are of no use."""
        upstream = self._upstream
        if self._connecting is not None:
            self._connecting.cancel()
        self._end()
        if upstream is not None:
            upstream.abort()

    def _end(self) -> None:
        self.is_over = True
        self._upstream = None

    def pause(self) -> None:
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        if self._upstream is not None:
            self._upstream.resume()
