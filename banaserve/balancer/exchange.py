"""One request's way: a place, an attempt, another one if need be, and the answer."""

from __future__ import annotations

import asyncio
import re

from banaserve.balancer import answers
from banaserve.balancer.client import Client
from banaserve.balancer.framing import ChunkedBody, ResponseHead, UntilClose
from banaserve.balancer.message import Message
from banaserve.balancer.office import Office
from banaserve.balancer.target import Target
from banaserve.balancer.upstream import Upstream
from banaserve.orchestrator.replicas.interface import Decision, Flight, Reason, Request

RETRIED = frozenset((429, 502, 503, 504))
"""Answers that another replica may not give: too busy, or not there."""

FAULTS = frozenset((502, 503, 504))
"""Answers that speak against the replica. Not 500: one bad request would open every circuit."""

_BACKOFF_S = 0.1
_USAGE = re.compile(rb'"(completion_tokens|cached_tokens)"\s*:\s*(\d{1,9})')
_EVENTS = re.compile(rb"\r\ncontent-type:[ \t]*text/event-stream", re.IGNORECASE)


class Exchange:
    """From the whole request to the last byte of the answer. Answers exactly once."""

    __slots__ = (
        "_backoff",
        "_body",
        "_client",
        "_connecting",
        "_flight",
        "_had_free_try",
        "_is_events",
        "_last",
        "_message",
        "_office",
        "_status",
        "_target",
        "_tried",
        "_upstream",
        "_why",
        "deadline_s",
        "is_over",
        "kind",
        "num_attempts",
        "num_reads",
        "request",
        "waits_until_s",
    )  # fmt: skip

    def __init__(
        self, office: Office, client: Client, message: Message, request: Request, deadline_s: float
    ) -> None:
        self._office, self._client, self._message = office, client, message
        self.request = request
        self.kind = (request.model, request.allowed_regions, request.was_forwarded)
        self.deadline_s = self.waits_until_s = deadline_s
        self.is_over = False
        self.num_attempts = self.num_reads = 0
        self._tried: set[str] = set()
        self._flight: Flight | None = None
        self._target: Target | None = None
        self._upstream: Upstream | None = None
        self._connecting: asyncio.Task[None] | None = None
        self._backoff: asyncio.TimerHandle | None = None
        self._body: object = None
        self._status = 0
        self._last = b""
        self._why = ""
        self._is_events = self._had_free_try = False

    # A place.

    def start(self, waits_until_s: float) -> None:
        """Send the request, or let it wait in the line."""
        self.waits_until_s = min(waits_until_s, self.deadline_s)
        line = self._office.line
        if not line.is_ahead_of(self.kind) and self.place():
            return
        if len(line) >= self._office.max_queue:
            self._answer(429, f"{len(line)} requests wait already; try again shortly", 1.0)
            return
        line.join(self)

    def place(self) -> bool:
        decision = self._office.decide(self.request, self._tried)
        if decision.target is not None:
            self._send(decision)
            return True
        if decision.reason is Reason.NONE_MAY:
            model = f" with model {self.request.model}" if self.request.model else ""
            regions = self.request.allowed_regions
            where = f" in {', '.join(sorted(regions))}" if regions is not None else ""
            self._answer(503, f"no replica here may serve a request{model}{where}", None)
            return True
        return False

    def waited_too_long(self) -> None:
        self._answer(503, self._why or "no replica became free in time; try again shortly", 2.0)

    # An attempt.

    def _send(self, decision: Decision) -> None:
        office = self._office
        now_s = office.now_s()
        assert decision.target is not None
        target = self._target = office.targets[decision.target]
        if self.num_attempts == 0:
            office.metrics.placed(target.view.id, decision.reason, now_s - self.request.arrived_s)
        self.num_attempts += 1
        self._flight = office.fleet.sent(self.request, decision, now_s)
        target.sent(now_s)
        upstream = target.pool.take()
        if upstream is not None:
            self._go(upstream)
        else:
            self._connecting = asyncio.get_running_loop().create_task(self._connect(target))

    async def _connect(self, target: Target) -> None:
        try:
            upstream = await target.pool.connect()
        except OSError as error:
            self._connecting = None
            if not self.is_over:
                why = "timed out" if isinstance(error, TimeoutError) else error.strerror or "failed"
                self.on_broken(f"cannot connect ({why.lower()})", was_reused=False)
            return
        self._connecting = None
        if self.is_over:
            target.pool.give_back(upstream)
        else:
            self._go(upstream)

    def _go(self, upstream: Upstream) -> None:
        self._upstream = upstream
        message, target = self._message, self._target
        assert target is not None
        fields = self._office.fields(message, target, self.request)
        upstream.send(message.parts(fields), self, message.method == b"HEAD")

    # The answer, as a sink of the connection.

    def on_head(self, head: ResponseHead, data: bytes) -> None:
        office, client, target, flight = self._office, self._client, self._target, self._flight
        assert target is not None
        assert flight is not None
        status = head.status
        if (
            status in RETRIED
            and self.num_attempts < office.max_attempts
            and self._has_other(target)
        ):
            self._drop_upstream()
            self._fail_attempt(target, flight, status, f"answered {status}")
            self._again(target)
            return
        body = self._body = head.body
        if self._message.is_http10 and isinstance(body, ChunkedBody):
            self._drop_upstream()
            self.on_broken("a chunked answer to a client of HTTP/1.0", was_reused=False)
            return
        self._status, self._last = status, data
        now_s = office.now_s()
        office.fleet.first_token(flight, now_s)
        office.metrics.first_byte(now_s - self.request.arrived_s)
        self._is_events = isinstance(body, ChunkedBody) and _EVENTS.search(head.lines) is not None
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
        office, target, flight = self._office, self._target, self._flight
        assert target is not None
        assert flight is not None
        now_s = office.now_s()
        self._flight = self._upstream = None
        if self._status < 400:
            usage = dict(_USAGE.findall(self._last[-4096:]))
            cached = usage.get(b"cached_tokens")
            tokens = int(usage.get(b"completion_tokens", self.num_reads))
            office.fleet.finished(flight, now_s, tokens, None if cached is None else int(cached))
        else:
            office.fleet.failed(flight, now_s)
        target.answered(self._status, self._status in FAULTS, now_s)
        self._end(self._status)

    def on_broken(self, why: str, was_reused: bool) -> None:
        office, target, flight = self._office, self._target, self._flight
        assert target is not None
        assert flight is not None
        self._upstream = None
        if self._status:
            self._break_off(target, flight, why)
            return
        if was_reused and not self._had_free_try:
            self._had_free_try = True
            # The server closed it while it was idle; all the others may be closed as well.
            target.pool.drop_idle()
            self._flight = None
            office.fleet.failed(flight, office.now_s())
            target.broke(False, office.now_s())
            self.num_attempts -= 1
            self._rejoin()
            return
        self._fail_attempt(target, flight, 0, why)
        if self.num_attempts < office.max_attempts:
            self._again(target)
        else:
            self._answer(502, f"{self._why}, after {self.num_attempts} attempts", 1.0)

    def _fail_attempt(self, target: Target, flight: Flight, status: int, why: str) -> None:
        now_s = self._office.now_s()
        self._flight = None
        self._office.fleet.failed(flight, now_s)
        self._why = f"replica {target.view.id}: {why}"
        if status:
            target.answered(status, status in FAULTS, now_s)
        else:
            target.broke(True, now_s)
            self._office.log(self._why)

    def _has_other(self, target: Target) -> bool:
        return self._office.has_other(self.request, {*self._tried, target.view.id})

    def _again(self, target: Target) -> None:
        office = self._office
        target.num_retried += 1
        self._tried.add(target.view.id)
        if office.has_other(self.request, self._tried):
            self._rejoin()
            return
        self._tried.clear()
        pause_s = _BACKOFF_S * 2**self.num_attempts
        self._backoff = asyncio.get_running_loop().call_later(pause_s, self._rejoin)

    def _rejoin(self) -> None:
        self._backoff = None
        if not self.is_over and not self.place():
            self._office.line.join(self, at_front=True)

    # Ends.

    def _break_off(self, target: Target, flight: Flight, why: str) -> None:
        """The answer has begun, so it cannot be begun elsewhere."""
        office, client, body = self._office, self._client, self._body
        now_s = office.now_s()
        self._flight = None
        office.fleet.failed(flight, now_s)
        target.broke(True, now_s)
        office.log(f"replica {target.view.id}: {why} in mid-answer")
        self.is_over = True
        if self._is_events and isinstance(body, ChunkedBody) and body.at_boundary:
            client.can_go_on = False
            client.write(answers.error_event(f"replica {target.view.id}: {why}"))
            client.done(self._message)
        else:
            client.abort()
        office.metrics.ended(502, now_s - self.request.arrived_s)
        office.ended(self)

    def _answer(self, status: int, why: str, retry_after_s: float | None) -> None:
        """Answer without a replica."""
        closes = not self._client.can_go_on
        self._client.write(answers.error(status, why, closes=closes, retry_after_s=retry_after_s))
        self._end(status)

    def _end(self, status: int) -> None:
        office = self._office
        self.is_over = True
        office.metrics.ended(status, office.now_s() - self.request.arrived_s)
        self._client.done(self._message)
        office.ended(self)

    def expire(self) -> None:
        """The request has had all its time."""
        self._release(is_fault=False)
        if self._status:
            self.is_over = True
            self._client.abort()
            self._office.ended(self)
        else:
            self._answer(504, "the request ran out of time", None)

    def cancel(self) -> None:
        if self.is_over:
            return
        self.is_over = True
        self._release(is_fault=False)
        self._office.metrics.cancelled()
        self._office.ended(self)

    def _release(self, is_fault: bool) -> None:
        """Let go of everything held for the attempt under way, or of the place in the line."""
        self._office.line.leave(self)
        if self._backoff is not None:
            self._backoff.cancel()
        if self._connecting is not None:
            self._connecting.cancel()
        self._drop_upstream()
        flight, self._flight = self._flight, None
        if flight is not None and self._target is not None:
            now_s = self._office.now_s()
            self._office.fleet.failed(flight, now_s)
            self._target.broke(is_fault, now_s)

    def _drop_upstream(self) -> None:
        if self._upstream is not None:
            self._upstream.abort()
            self._upstream = None

    def pause(self) -> None:
        if self._upstream is not None:
            self._upstream.pause()

    def resume(self) -> None:
        if self._upstream is not None:
            self._upstream.resume()
