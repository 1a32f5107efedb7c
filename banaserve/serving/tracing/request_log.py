"""Log of the front door's last requests, for ``banaserve trace``."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from banaserve.base.clock import Clock
from banaserve.base.errors import UserError
from banaserve.base.types import ClusterView, InstanceId, ObservedRequest, Route
from banaserve.contracts.trace_events import (
    KEPT_REQUESTS,
    MAX_EVENTS,
    FirstToken,
    FrontEvent,
    LegBegan,
    RequestEnded,
    RequestSummary,
    RouteCandidate,
    Routed,
    TraceLine,
)
from banaserve.serving.monitoring import metrics
from banaserve.serving.tracing.spans import FRONT_DOOR

OBSERVED_REQUESTS = 20_000
"""Number of requests kept for policies, which compare a load with earlier requests.

They are those of five minutes at 66 requests per second.
"""
_NAMED = 5
_PREFIXES = ("chatcmpl-", "cmpl-")
_COUNTED_ENDS = frozenset({"stop", "length", "closed", "error"})


class RequestSpan(NamedTuple):
    """Identity of a request's OpenTelemetry span.

    Attributes:
        trace_id: Id of the trace, 32 hexadecimal digits.
        exemplar: Labels that lead from a histogram to the trace; None if the trace is not recorded.
    """

    trace_id: str
    exemplar: dict[str, str] | None


class SeenRoute(NamedTuple):
    """A policy's choice with the view it was made from; turned into an event only on a query."""

    policy: str
    route: Route
    split_blocker: str | None
    view: ClusterView

    def event(self) -> Routed:
        candidates = [
            RouteCandidate(i.id, i.role.value, i.inflight_requests, i.inflight_prefill_tokens)
            for i in self.view.instances.values()
            if i.ready
        ]
        prefill, decode, reason = self.route.prefill, self.route.decode, str(self.route.reason)
        return Routed(self.policy, prefill, decode, reason, self.split_blocker, candidates)


class TracedLeg(NamedTuple):
    """A leg whose notes its engine can be asked for.

    Attributes:
        name: Engine's id of the request, or the common stem of several ids (with n > 1).
    """

    instance: str
    incarnation: int
    name: str

    @property
    def life(self) -> tuple[str, int]:
        """Instance and incarnation: a restarted instance has lost its notes."""
        return self.instance, self.incarnation


class RequestNotes:
    """Notes of one request; all times are on the clock of the log.

    Attributes:
        tokens_so_far: Function that returns the number of tokens sent to the client.
        num_dropped: Number of events beyond ``MAX_EVENTS``, which were dropped.
        span: Identity of the request's OpenTelemetry span; None if it is not traced.
    """

    def __init__(self, clock: Clock, request_id: str, prompt_tokens: int, call: HttpCall) -> None:
        self._clock = clock
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.arrived_s = call.received_s
        self.cached_tokens = 0
        self.tokens_so_far: Callable[[], int] = lambda: 0
        self.legs: list[TracedLeg] = []
        self.num_dropped = 0
        self.first_token_s: float | None = None
        self.finish_reason: str | None = None
        self.ended: tuple[float, RequestEnded] | None = None
        self._call = call
        self.span: RequestSpan | None = None
        self._events: list[tuple[float, FrontEvent | SeenRoute, str]] = []

    def count_output(self) -> int:
        """Keep and return the number of tokens, and drop the function that has counted them.

        Notes outlive their request by far: that function holds the request's detokenizer, and so
        the tokenizer of an engine's client that may be gone.
        """
        counted = self.tokens_so_far()
        self.tokens_so_far = lambda: counted
        return counted

    def note(self, event: FrontEvent | SeenRoute, leg_id: str = "", incarnation: int = 0) -> None:
        """Note an event that has just happened; it is dropped beyond ``MAX_EVENTS``.

        Args:
            leg_id: Engine's id of the leg; empty for the whole request.
            incarnation: Incarnation of the instance of ``LegBegan``, which has notes of the leg.
        """
        at_s = self._clock.now()
        if isinstance(event, FirstToken):  # noted again where the answer starts over
            self.first_token_s = at_s
        elif isinstance(event, LegBegan) and len(self.legs) < MAX_EVENTS:
            self.legs.append(TracedLeg(event.instance, incarnation, leg_id))
        if len(self._events) < MAX_EVENTS:
            self._events.append((at_s, event, leg_id))
        else:
            self.num_dropped += 1

    def end(self, how: str, error: str = "") -> None:
        """Note the end of the request, even where other events were dropped, and count it.

        The request's trace becomes the exemplar of its buckets.
        """
        ended_s = self._clock.now()
        self.ended = (ended_s, RequestEnded(how, self.tokens_so_far(), error))
        exemplar = self.span.exemplar if self.span is not None else None
        if self.first_token_s is not None:
            metrics.TTFT_S.observe(self.first_token_s - self.arrived_s, exemplar)
        counted = how if how in _COUNTED_ENDS else "other"
        metrics.LATENCY_S.labels(counted).observe(ended_s - self.arrived_s, exemplar)

    def events(self) -> list[TraceLine]:
        """Return the events in the order in which they happened; times begin with the arrival."""
        found = [*self._events, (*self.ended, "")] if self.ended is not None else self._events
        return [
            TraceLine(
                at_s - self.arrived_s,
                FRONT_DOOR,
                event.event() if isinstance(event, SeenRoute) else event,
                leg_id,
            )
            for at_s, event, leg_id in found
        ]

    def observed(self) -> ObservedRequest:
        """Return what a policy may know of the request; its instance is that of its last leg."""
        has_ended = self.ended is not None
        return ObservedRequest(
            self.arrived_s,
            self.prompt_tokens,
            self.cached_tokens,
            self.tokens_so_far(),
            InstanceId(self.legs[-1].instance) if self.legs and not has_ended else None,
            self.first_token_s,
            self.ended[0] if self.ended is not None else None,
        )

    def summary(self) -> RequestSummary:
        ended_s = self.ended[0] if self.ended is not None else self._clock.now()
        first_s, call, answered_s = self.first_token_s, self._call, self._call.answered_s
        return RequestSummary(
            id=self.request_id,
            arrived_at_s=call.arrived_at_s,
            prompt_tokens=self.prompt_tokens,
            cached_tokens=self.cached_tokens,
            output_tokens=self.tokens_so_far(),
            instances=list(dict.fromkeys(leg.instance for leg in self.legs)),
            ttft_s=None if first_s is None else first_s - self.arrived_s,
            took_s=ended_s - self.arrived_s,
            end=self.ended[1].how if self.ended is not None else "",
            received_s=call.received_s - call.began_s,
            answered_s=None if answered_s is None else answered_s - self.arrived_s,
            trace_id=self.span.trace_id if self.span is not None else "",
        )


class RequestLog:
    """Requests under way and the last ones that have ended. Used on the event loop only.

    Args:
        kept: Number of ended requests whose notes are kept.
    """

    def __init__(self, clock: Clock, kept: int = KEPT_REQUESTS) -> None:
        self._clock = clock
        self._open: dict[int, RequestNotes] = {}
        self._ended: deque[RequestNotes] = deque(maxlen=kept)
        self._observed: deque[ObservedRequest] | None = None

    def observe(self, kept: int = OBSERVED_REQUESTS) -> None:
        """Keep what ``observed`` returns of many more ended requests than have notes."""
        self._observed = deque(maxlen=kept)

    @contextlib.contextmanager
    def following(
        self, request_id: str, prompt_tokens: int, call: HttpCall
    ) -> Iterator[RequestNotes]:
        """Keep notes of a request that has arrived by ``call``, until the block ends."""
        notes = RequestNotes(self._clock, request_id, prompt_tokens, call)
        self._open[id(notes)] = notes
        how, error = "closed", ""
        try:
            yield notes
        except Exception as failure:
            how, error = "error", str(failure) or type(failure).__name__
            raise
        finally:
            notes.end(notes.finish_reason or how, error)
            del self._open[id(notes)]
            self._ended.append(notes)
            if self._observed is not None:
                self._observed.append(notes.observed())

    def last(self, count: int | None = None) -> list[RequestSummary]:
        """Return the last ``count`` requests to arrive, or all known ones, the oldest first."""
        known = sorted([*self._ended, *self._open.values()], key=lambda notes: notes.arrived_s)
        first = 0 if count is None else max(0, len(known) - count)
        return [notes.summary() for notes in known[first:]]

    def observed(self, since_s: float) -> list[ObservedRequest]:
        """Return requests under way and those that arrived since ``since_s``, in order of arrival.

        Ended requests are included only if they ended after ``observe`` was called.
        """
        found = [request for request in self._observed or () if request.arrival_s >= since_s]
        found += [notes.observed() for notes in self._open.values()]
        return sorted(found, key=lambda request: request.arrival_s)

    def lately(self, since_s: float) -> list[ObservedRequest]:
        """Return requests under way, and those that have ended since; reads no others."""
        found = []
        for notes in reversed(self._ended):
            if notes.ended is not None and notes.ended[0] < since_s:
                break
            found.append(notes.observed())
        return found[::-1] + [notes.observed() for notes in self._open.values()]

    def find(self, wanted: str) -> RequestNotes | None:
        """Return the request of this id, or the only one whose id begins with it; None for none.

        The id may be given without ``chatcmpl-`` or ``cmpl-``, as a client's X-Request-Id is, and
        it may be that of the request's OpenTelemetry trace. If several requests have the id, the
        last one is returned.

        Raises:
            UserError: Several ids begin with ``wanted``.
        """
        known = [*self._ended, *self._open.values()]
        fitting = [one for one in known if any(n.startswith(wanted) for n in _names(one))]
        if not fitting:
            fitting = [one for one in known if one.span and one.span.trace_id == wanted]
        exact = [one for one in fitting if wanted in _names(one)]
        ids = sorted({notes.request_id for notes in exact or fitting})
        if len(ids) > 1:
            more = f" and {len(ids) - _NAMED} more" if len(ids) > _NAMED else ""
            raise UserError(f"{wanted} may be {', '.join(ids[:_NAMED])}{more}: give more of the id")
        return max(exact or fitting, key=lambda notes: notes.arrived_s, default=None)


def _names(notes: RequestNotes) -> list[str]:
    return [notes.request_id, *(notes.request_id.removeprefix(one) for one in _PREFIXES)]


@dataclass
class HttpCall:
    """A call of the server, by HTTP or not; times are on the machine's monotonic clock.

    Attributes:
        began_s: Time at which the head had been received.
        began_at_s: The same time in seconds since 1970.
        received_s: Time at which the last byte of the body was received; ``began_s`` before that.
        answered_s: Time at which the last byte of the answer was written, or the client left.
        traced: State that the tracer keeps of the call: its own span, and each request's notes.
    """

    began_s: float
    began_at_s: float
    method: str = ""
    path: str = ""
    headers: Mapping[str, str] = field(default_factory=dict)
    received_s: float = 0.0
    answered_s: float | None = None
    status: int = 0
    traced: Any = None

    def __post_init__(self) -> None:
        self.received_s = self.received_s or self.began_s

    @property
    def arrived_at_s(self) -> float:
        """Time at which the body had been received, in seconds since 1970."""
        return self.began_at_s + self.received_s - self.began_s


http_call: ContextVar[HttpCall | None] = ContextVar("http_call", default=None)
"""HTTP request that the current task serves; None for a call without HTTP."""
