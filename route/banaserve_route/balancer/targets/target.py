"""Target of requests, a replica or a peer: its connections, health and counts."""

from __future__ import annotations

from collections import Counter

from banaserve.base.net.tls import Certificates
from banaserve_route.balancer.config import (
    MAX_COMPARED,
    BalancerSettings,
    Endpoint,
    HealthSettings,
)
from banaserve_route.balancer.http.replica_connection import ConnectionPool
from banaserve_route.balancer.targets.outcomes import AttemptOutcome, outcome_of
from banaserve_route.balancer.targets.outliers import OutlierReason
from banaserve_route.policies.interface import Flight, PeerView, ReplicaView, RoutingReason

SLOW_START_REQUESTS = 64
"""Number of requests at once that a replica takes at the end of its slow start."""


class Target:
    """Replica or peer as the data plane sees it.

    Attributes:
        name: Name of the target for the log.
        fields: Header lines of every request to the target.
        key: Key in ``fields``, sent instead of the client's key; empty for none.
        takes_keys: True if the target may be shown keys of clients.
        is_healthy: True if the target is healthy according to the last probes.
        complaint: Words for the log on the last probe, if it has failed.
        was_refused: True if the target's port has refused a connection since it was last healthy.
        num_answers: Number of answers by status.
        num_decisions: Number of requests for which the target was the first one, by the reason.
        recent: Outcomes of recent requests, to compare replicas; None if they are not compared.
        judged_since_s: Time before which requests were sent that do not count in the comparison.
    """

    def __init__(
        self,
        view: ReplicaView,
        endpoint: Endpoint,
        settings: BalancerSettings,
        own_fields: bytes = b"",
        tls: Certificates | None = None,
    ) -> None:
        """``tls`` holds the trusted authorities; needed if the endpoint has TLS."""
        self.view = view
        self.is_peer = isinstance(view, PeerView)
        self.endpoint = endpoint
        self.name = f"{'peer' if self.is_peer else 'replica'} {endpoint.url}"
        health = settings.health
        self.pool = ConnectionPool(endpoint, settings.limits.connect_timeout_s, tls)
        self.breaker = Breaker(
            health.breaker_failures, health.breaker_pause_s, health.breaker_longest_pause_s
        )
        self._own_fields = own_fields
        self.recent: list[AttemptOutcome] | None = None
        self.take_settings("", 0, settings)
        self.takes_keys = True
        self.is_healthy = True
        self.complaint = "does not answer"
        self.ejection = Ejection()
        self.judged_since_s = 0.0
        self._began_s: float | None = None
        self._starting_s = 0.0
        self.was_refused = False
        self.num_failed_looks = 0
        self.num_answers: Counter[int] = Counter()
        self.num_decisions: Counter[RoutingReason] = Counter()
        self.num_broken = 0
        self.num_retried = 0

    def take_settings(self, key: str, max_outstanding: int, settings: BalancerSettings) -> None:
        """Apply these settings from now on; requests under way are not affected."""
        self.fields = b"Host: %b\r\n" % self.endpoint.host_field.encode() + self._own_fields
        self.key = key
        if key:
            self.fields += b"Authorization: Bearer %b\r\n" % key.encode()
        self._max_outstanding = max_outstanding
        self._slow_start_s = settings.health.slow_start_s
        if not settings.compares_replicas or self.is_peer:
            self.recent = None
        elif self.recent is None:
            self.recent = []
        self.pool.connect_timeout_s = settings.limits.connect_timeout_s
        health = settings.health
        self.breaker.take_settings(
            health.breaker_failures, health.breaker_pause_s, health.breaker_longest_pause_s
        )

    @property
    def is_full(self) -> bool:
        return 0 < self._max_outstanding <= self.view.outstanding

    @property
    def is_up(self) -> bool:
        """Return whether the target gets requests as soon as it has room."""
        return self.is_healthy and not self.breaker.is_open and not self.ejection.is_active

    @property
    def is_starting(self) -> bool:
        """Return whether the target takes fewer requests than usual, since it has just begun."""
        return self._began_s is not None

    def begin_slowly(self, now_s: float, at_least_s: float = 0.0) -> None:
        """Let a replica begin with one request, and then with ever more at once.

        It is judged by these alone: others may be of a replica of the same id elsewhere.
        """
        self.judged_since_s = now_s
        self._starting_s = max(self._slow_start_s, at_least_s)
        is_slow = self._starting_s > 0 and not self.is_peer
        self._began_s = now_s if is_slow else None

    def _has_room(self, now_s: float) -> bool:
        if self._began_s is None:
            return not self.is_full
        share = (now_s - self._began_s) / self._starting_s
        if share >= 1.0:
            self._began_s = None
            return not self.is_full
        limit = 1 + int(share * (SLOW_START_REQUESTS - 1))
        return self.view.outstanding < limit and not self.is_full

    def refresh(self, now_s: float) -> bool:
        """Update ``view.is_available``; return whether the target may be sent a request."""
        view = self.view
        is_in_service = self.is_healthy and not self.ejection.is_active
        view.is_available = is_in_service and self._has_room(now_s) and self.breaker.allows(now_s)
        return view.is_available

    def sent(self, now_s: float) -> bool:
        """Record a request sent to the target, which the view counts already.

        Return whether the request is on trial, since the circuit is open.
        """
        is_on_trial = self.breaker.is_open
        if is_on_trial or self._max_outstanding or self.is_starting:
            self.breaker.sent()
            self.refresh(now_s)
        return is_on_trial

    def answered(self, status: int, is_fault: bool, now_s: float) -> None:
        """Record the target's answer to a request."""
        self.num_answers[status] += 1
        if is_fault:
            self.breaker.failed(now_s)
        else:
            self.breaker.succeeded()
        if is_fault or self._max_outstanding or not self.view.is_available:
            self.refresh(now_s)

    def broke(self, is_fault: bool, was_on_trial: bool, now_s: float) -> None:
        """Record a request to the target that ended without a complete answer.

        Args:
            is_fault: True if the target is at fault, and not, say, a client that went away.
            was_on_trial: Result of ``sent`` for the request.
        """
        if is_fault:
            self.num_broken += 1
            self.breaker.failed(now_s)
        elif was_on_trial:
            self.breaker.given_up()
        self.refresh(now_s)

    def record(self, flight: Flight, status: int, now_s: float) -> None:
        """Keep the outcome of an attempt, to compare replicas.

        Args:
            status: Status of the answer; 502 if it broke off by the replica's fault, 0 if it was
                cancelled.
        """
        recent = self.recent
        if recent is None or len(recent) >= 2 * MAX_COMPARED:
            # At a high rate the first ones in each interval tell enough; the others cost nothing.
            return
        if flight.sent_s >= self.judged_since_s:
            recent.append(outcome_of(flight, status, now_s))

    def eject(self, reason: OutlierReason, now_s: float, health: HealthSettings) -> float:
        """Send the target no more requests for a while; return for how many seconds."""
        base_s, longest_s = health.outlier_base_ejection_s, health.outlier_max_ejection_s
        duration_s = self.ejection.begin(reason, now_s, base_s, longest_s)
        self.refresh(now_s)
        return duration_s

    def come_back(self, now_s: float, slowly_s: float = 0.0) -> None:
        """Serve again, after an ejection or death: slowly at first, and judged by new requests."""
        self.ejection.end(now_s)
        if self.recent is not None:
            self.recent.clear()
        self.begin_slowly(now_s, slowly_s)
        self.refresh(now_s)

    def looked(self, is_well: bool, failures: int, now_s: float) -> bool:
        """Record a health probe; return whether it changed ``is_healthy``.

        Args:
            failures: Number of failed probes in a row that take the target out.
        """
        was_healthy = self.is_healthy
        self.num_failed_looks = 0 if is_well else self.num_failed_looks + 1
        if is_well:
            if not self.is_healthy:
                self.come_back(now_s)
            self.is_healthy = True
        elif self.num_failed_looks >= failures:
            self.is_healthy = False
        self.refresh(now_s)
        return was_healthy != self.is_healthy


class Ejection:
    """Time in which an outlier gets no requests.

    As in Envoy, the n-th ejection in a row is n times as long as the first one.

    Attributes:
        is_active: True if the replica is ejected.
        until_s: Time at which the last ejection ends.
        counts: Number of ejections by reason.
    """

    __slots__ = ("_num_in_a_row", "counts", "is_active", "until_s")

    def __init__(self) -> None:
        self.is_active = False
        self.until_s = 0.0
        self.counts: Counter[OutlierReason] = Counter()
        self._num_in_a_row = 0

    def begin(self, reason: OutlierReason, now_s: float, base_s: float, longest_s: float) -> float:
        """Begin an ejection; return its duration in seconds.

        Args:
            longest_s: Maximum duration; after as long a time in service, the next ejection is a
                first one again.
        """
        in_service_s = now_s - self.until_s
        self._num_in_a_row = 1 if in_service_s >= longest_s else self._num_in_a_row + 1
        duration_s = min(base_s * self._num_in_a_row, longest_s)
        self.is_active, self.until_s = True, now_s + duration_s
        self.counts[reason] += 1
        return duration_s

    def end(self, now_s: float) -> None:
        """End the ejection, if there is one."""
        if self.is_active:
            self.is_active, self.until_s = False, min(self.until_s, now_s)


class Breaker:
    """Circuit breaker: a target that fails repeatedly gets no requests for a while.

    A closed breaker lets all requests through, an open one none, a half-open one a single trial.

    Attributes:
        is_open: True if no request may be sent before ``retry_at_s``, and then only one on trial.
    """

    __slots__ = (
        "_failures",
        "_limit",
        "_longest_pause_s",
        "_pause_s",
        "_shortest_pause_s",
        "_trial",
        "is_open",
        "num_opened",
        "retry_at_s",
    )  # fmt: skip

    def __init__(self, failures: int, pause_s: float, longest_pause_s: float) -> None:
        self._failures = 0
        self._trial = self.is_open = False
        self.take_settings(failures, pause_s, longest_pause_s)
        self.num_opened = 0
        self.retry_at_s = 0.0

    def take_settings(self, failures: int, pause_s: float, longest_pause_s: float) -> None:
        """Apply these settings; an open circuit stays open until its pause ends."""
        self._limit = failures
        self._shortest_pause_s, self._longest_pause_s = pause_s, longest_pause_s
        if not self.is_open:
            self._pause_s = pause_s

    def allows(self, now_s: float) -> bool:
        """Return whether a request may be sent; after the pause, one at a time."""
        return not self.is_open or (now_s >= self.retry_at_s and not self._trial)

    def sent(self) -> None:
        """Record a request that was sent."""
        self._trial = self.is_open

    def succeeded(self) -> None:
        """Record a request that was answered."""
        self._failures = 0
        if self.is_open:
            self.is_open = self._trial = False
            self._pause_s = self._shortest_pause_s

    def failed(self, now_s: float) -> None:
        """Record a request that failed by the target's fault."""
        self._failures += 1
        if self.is_open and not self._trial:
            return
        if not self.is_open and self._failures < self._limit:
            return
        if self.is_open:
            self._pause_s = min(2 * self._pause_s, self._longest_pause_s)
        self.is_open, self._trial = True, False
        self.num_opened += 1
        self.retry_at_s = now_s + self._pause_s

    def given_up(self) -> None:
        """Record that the trial ended without showing the target's health: cancelled, say."""
        self._trial = False
