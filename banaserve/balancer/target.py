"""A replica or a peer as the data plane sees it: connections, health, circuit, counts."""

from __future__ import annotations

from collections import Counter

from banaserve.balancer.breaker import Breaker
from banaserve.balancer.endpoint import Endpoint
from banaserve.balancer.settings import BalancerSettings
from banaserve.balancer.upstream import Pool
from banaserve.orchestrator.replicas.interface import PeerView, ReplicaView


class Target:
    """Somewhere a request can be sent.

    Attributes:
        name: For the log.
        fields: Header lines that every request to it gets.
        has_key: ``fields`` holds a key; the client's is not passed on.
        is_healthy: What the last looks at it say.
        was_refused: Nobody listened where it should be, since it was last healthy.
        num_answers: By status.
    """

    def __init__(
        self,
        view: ReplicaView,
        endpoint: Endpoint,
        settings: BalancerSettings,
        own_fields: bytes = b"",
    ) -> None:
        self.view = view
        self.is_peer = isinstance(view, PeerView)
        self.endpoint = endpoint
        self.name = f"{'peer' if self.is_peer else 'replica'} {endpoint.url}"
        health = settings.health
        self.pool = Pool(endpoint, settings.limits.connect_timeout_s)
        self.breaker = Breaker(
            health.breaker_failures, health.breaker_pause_s, health.breaker_longest_pause_s
        )
        self._own_fields = own_fields
        self.take_settings("", 0, settings)
        self.is_healthy = True
        self.was_refused = False
        self.num_failed_looks = 0
        self.num_answers: Counter[int] = Counter()
        self.num_broken = 0
        self.num_retried = 0

    def take_settings(self, key: str, max_outstanding: int, settings: BalancerSettings) -> None:
        """Let these hold from here on; requests under way go on as they are."""
        self.fields = b"Host: %b\r\n" % self.endpoint.authority.encode() + self._own_fields
        self.has_key = bool(key)
        if key:
            self.fields += b"Authorization: Bearer %b\r\n" % key.encode()
        self._max_outstanding = max_outstanding
        self.pool.connect_timeout_s = settings.limits.connect_timeout_s
        health = settings.health
        self.breaker.take_settings(
            health.breaker_failures, health.breaker_pause_s, health.breaker_longest_pause_s
        )

    @property
    def is_full(self) -> bool:
        return 0 < self._max_outstanding <= self.view.outstanding

    def refresh(self, now_s: float) -> bool:
        """Bring ``view.is_available`` up to date; returns whether it may be sent a request."""
        view = self.view
        view.is_available = self.is_healthy and not self.is_full and self.breaker.allows(now_s)
        return view.is_available

    def sent(self, now_s: float) -> None:
        """A request is on its way to it, counted in its view already."""
        if self.breaker.is_open or self._max_outstanding:
            self.breaker.sent()
            self.refresh(now_s)

    def answered(self, status: int, is_fault: bool, now_s: float) -> None:
        """A request has had its answer from it."""
        self.num_answers[status] += 1
        if is_fault:
            self.breaker.failed(now_s)
        else:
            self.breaker.succeeded()
        if is_fault or self._max_outstanding or not self.view.is_available:
            self.refresh(now_s)

    def broke(self, is_fault: bool, now_s: float) -> None:
        """A request to it ended without a whole answer.

        Args:
            is_fault: It says something of the target: not a client that went away.
        """
        if is_fault:
            self.num_broken += 1
            self.breaker.failed(now_s)
        else:
            self.breaker.given_up()
        self.refresh(now_s)

    def looked(self, is_well: bool, failures: int, now_s: float) -> bool:
        """Take in a look at its health; returns whether that changed it.

        Args:
            failures: Failed looks in a row that take it out.
        """
        was_healthy = self.is_healthy
        self.num_failed_looks = 0 if is_well else self.num_failed_looks + 1
        if is_well:
            self.is_healthy = True
        elif self.num_failed_looks >= failures:
            self.is_healthy = False
        self.refresh(now_s)
        return was_healthy != self.is_healthy
