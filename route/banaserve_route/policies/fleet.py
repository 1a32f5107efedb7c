"""Live counters of one balancer, kept consistent with its policy.

The data plane reports events, in its own order and with its own times, and asks for decisions; the
simulator drives the same code in virtual time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping
from copy import copy
from typing import TypeVar

import msgspec
from msgspec import structs

from banaserve.base.errors import UserError
from banaserve_route.policies.caches.known_caches import KnownCaches
from banaserve_route.policies.interface import (
    FleetView,
    Flight,
    PeerView,
    ReplicaId,
    ReplicaPolicy,
    ReplicaView,
    Request,
    RoutingDecision,
)

ROUND_TRIP_WEIGHT = 0.3
"""Weight of the latest measurement in the smoothed round-trip time, as in GORGO."""

MAX_UNREPORTED = 1024
"""Maximum number of requests to a target that count as sent since its last report."""

View = TypeVar("View", bound=ReplicaView)


class Report(msgspec.Struct, frozen=True):
    """Load that a replica reports, or that a peer reports as the sum over its replicas.

    Attributes:
        queue_length: Length of a peer's own queue.
        num_available: Number of a peer's replicas that can start a request at once.
        num_replicas: Number of a peer's replicas.
    """

    at_s: float
    pending: int = 0
    running: int = 0
    kv_used_fraction: float = 0.0
    queue_length: int = 0
    num_available: int = 0
    num_replicas: int = 0


class Fleet:
    """Replicas and peers of one balancer, and its policy.

    Every ``sent`` is followed by one ``finished`` or ``failed``. All times are of one monotonic
    clock; reports older than the last one are dropped.

    Attributes:
        caches: Caches of the replicas that publish events of them.
    """

    def __init__(self, policy: ReplicaPolicy, region: str = "", staleness_s: float = 0.0) -> None:
        """Create a fleet without replicas.

        Args:
            staleness_s: Maximum age of the counters that the policy sees, in seconds; 0 is live.
                Positive values imitate balancers that scrape metrics, for comparison.
        """
        if not 0 <= staleness_s < float("inf"):
            raise UserError(f"staleness_s is {staleness_s}: give 0 or more")
        self.policy = policy
        self.region = region
        self.queue_length = 0
        self.caches = KnownCaches()
        self._staleness_s = staleness_s
        self._replicas: dict[ReplicaId, ReplicaView] = {}
        self._peers: dict[ReplicaId, PeerView] = {}
        self._sorted: tuple[list[ReplicaView], list[PeerView]] | None = None
        self._seen: tuple[float, list[ReplicaView], list[PeerView]] | None = None
        self._flights: dict[int, tuple[Flight, ReplicaView | None]] = {}
        self._sent_s: dict[ReplicaId, deque[float]] = {}

    def add(self, view: ReplicaView) -> None:
        """Add a replica, or a peer if ``view`` is a ``PeerView``.

        Raises:
            UserError: The id is already in use.
        """
        if view.id in self._replicas or view.id in self._peers:
            raise UserError(f"two replicas are called {view.id}: give each its own id")
        if isinstance(view, PeerView):
            self._peers[view.id] = view
        else:
            self._replicas[view.id] = view
        self._sorted = self._seen = None

    def remove(self, target: ReplicaId) -> None:
        """Remove a replica or peer; its flights still end individually."""
        self._replicas.pop(target, None)
        self._peers.pop(target, None)
        self._sent_s.pop(target, None)
        self.caches.remove(target)
        self._sorted = self._seen = None
        self.policy.on_replica_gone(target)

    def get(self, target: ReplicaId) -> ReplicaView | None:
        """Return the live view of a replica or peer; None if it has left."""
        return self._replicas.get(target) or self._peers.get(target)

    def set_available(self, target: ReplicaId, is_available: bool) -> None:
        """Set whether a replica or peer may get requests. Its cache stays known."""
        view = self.get(target)
        if view is not None:
            view.is_available = is_available

    def restarted(self, target: ReplicaId) -> None:
        """Record that a replica has restarted with an empty cache."""
        self.policy.on_replica_gone(target)

    def reported(self, target: ReplicaId, report: Report) -> None:
        """Record a report; a report older than the last one is dropped."""
        view = self.get(target)
        if view is None or (view.reported_at_s is not None and report.at_s < view.reported_at_s):
            return
        view.reported_at_s = report.at_s
        view.pending, view.running = report.pending, report.running
        view.kv_used_fraction = report.kv_used_fraction
        if (sent_s := self._sent_s.get(target)) is not None:
            while sent_s and sent_s[0] < report.at_s:
                sent_s.popleft()
            view.sent_since_report = len(sent_s)
        if isinstance(view, PeerView):
            view.queue_length, view.num_available = report.queue_length, report.num_available
            view.num_replicas = report.num_replicas

    def measured_round_trip(self, target: ReplicaId, milliseconds: float) -> None:
        """Record a measured round-trip time; all but the first are smoothed."""
        view = self.get(target)
        if view is None or not 0 <= milliseconds < float("inf"):
            return
        known = view.round_trip_ms
        step = ROUND_TRIP_WEIGHT * (milliseconds - known)
        view.round_trip_ms = known + step if known else milliseconds

    def view(self, now_s: float) -> FleetView:
        """Return the view of the policy at ``now_s``."""
        if self._sorted is None:
            self._sorted = (_by_id(self._replicas.values()), _by_id(self._peers.values()))
        replicas, peers = self._sorted
        by_id: Mapping[ReplicaId, ReplicaView] = self._replicas
        if self._staleness_s:
            replicas, peers = self._stale(now_s, replicas, peers)
            by_id = {view.id: view for view in replicas}
        return FleetView(now_s, self.region, self.queue_length, replicas, peers, by_id)

    def with_known_hits(self, request: Request) -> Request:
        """Return ``request`` with what is known of its prefix from events, at this moment."""
        if not request.blocks:
            return request
        return structs.replace(request, known_hits=self.caches.hits(request))

    def choose(self, request: Request, now_s: float) -> RoutingDecision:
        """Return the policy's decision for ``request``."""
        return self.policy.choose(request, self.view(now_s))

    def sent(self, request: Request, decision: RoutingDecision, now_s: float) -> Flight:
        """Count ``request`` as sent to the decision's target; return its flight.

        Raises:
            ValueError: The decision has no target.
        """
        target = decision.target
        if target is None:
            raise ValueError(f"{request.id} is held: there is no target to send it to")
        flight = Flight(request, decision, target, now_s)
        view = self.get(target)
        self._flights[id(flight)] = (flight, view)
        if view is not None:
            flight.backlog_tokens = view.uncached_tokens
            flight.outstanding_tokens = view.outstanding_tokens
            flight.outstanding = view.outstanding
            flight.round_trip_ms = view.round_trip_ms
            _count(view, flight, +1)
            view.prefilling += 1
            view.uncached_tokens += _uncached(flight)
            view.num_sent += 1
            sent_s = self._sent_s.get(target)
            if sent_s is None:
                sent_s = self._sent_s[target] = deque(maxlen=MAX_UNREPORTED)
            sent_s.append(now_s)
            view.sent_since_report = len(sent_s)
        self.caches.sent(flight)
        self.policy.on_sent(flight)
        return flight

    def first_token(self, flight: Flight, now_s: float) -> None:
        """Record that the answer has begun; only the first call counts."""
        if flight.first_token_s is not None or flight.ended_s is not None:
            return
        flight.first_token_s = now_s
        self._end_prefill(flight)
        self.policy.on_first_token(flight)

    def finished(
        self, flight: Flight, now_s: float, output_tokens: int, cached_tokens: int | None = None
    ) -> None:
        """Record that the answer is complete; without a first token before, that is now, too."""
        self.first_token(flight, now_s)
        if self._end(flight, now_s):
            flight.output_tokens, flight.cached_tokens = output_tokens, cached_tokens
            self.caches.ended(flight, is_answered=True)
            self.policy.on_finished(flight)

    def failed(self, flight: Flight, now_s: float, is_fault: bool = True) -> None:
        """Record that the attempt ended without an answer: refused, interrupted or cancelled.

        Args:
            is_fault: True if the failure is the target's fault, see ``Flight``.
        """
        if flight.first_token_s is None and flight.ended_s is None:
            self._end_prefill(flight)
        if self._end(flight, now_s):
            flight.is_fault = is_fault
            self.caches.ended(flight, is_answered=False)
            self.policy.on_failed(flight)

    def waiting_flights(self) -> Iterator[Flight]:
        """Yield the flights under way without a first token."""
        return (one for one, _ in self._flights.values() if one.first_token_s is None)

    def check(self) -> None:
        """Assert that every counter is the sum over the flights under way."""
        for view in (*self._replicas.values(), *self._peers.values()):
            flights = [one for one, counted in self._flights.values() if counted is view]
            waiting = [one for one in flights if one.first_token_s is None]
            assert view.outstanding == len(flights), view
            assert view.prefilling == len(waiting), view
            assert view.outstanding_tokens == sum(one.request.num_tokens for one in flights), view
            assert view.uncached_tokens == sum(map(_uncached, waiting)), view
            expected = sum(one.request.expected_output_tokens for one in flights)
            assert view.output_tokens == expected, view

    def _end_prefill(self, flight: Flight) -> None:
        _, view = self._flights.get(id(flight), (flight, None))
        if view is not None:
            view.prefilling -= 1
            view.uncached_tokens -= _uncached(flight)

    def _end(self, flight: Flight, now_s: float) -> bool:
        if (counted := self._flights.pop(id(flight), None)) is None:
            return False
        flight.ended_s = now_s
        # The view that counted the flight: another one may have joined under the same id since.
        if (view := counted[1]) is not None:
            _count(view, flight, -1)
        return True

    def _stale(
        self, now_s: float, replicas: list[ReplicaView], peers: list[PeerView]
    ) -> tuple[list[ReplicaView], list[PeerView]]:
        if self._seen is None or now_s - self._seen[0] >= self._staleness_s:
            self._seen = (now_s, list(map(copy, replicas)), list(map(copy, peers)))
        _, old_replicas, old_peers = self._seen
        for old, live in zip([*old_replicas, *old_peers], [*replicas, *peers], strict=True):
            # A dead replica is known from failing requests, not from its metrics.
            old.is_available = live.is_available
        return old_replicas, old_peers


def _count(view: ReplicaView, flight: Flight, sign: int) -> None:
    view.outstanding += sign
    view.outstanding_tokens += sign * flight.request.num_tokens
    view.output_tokens += sign * flight.request.expected_output_tokens


def _by_id(views: Iterable[View]) -> list[View]:
    return sorted(views, key=lambda view: view.id)


def _uncached(flight: Flight) -> int:
    missed = flight.request.num_tokens - flight.decision.hit_tokens
    return missed if missed > 0 else 0
