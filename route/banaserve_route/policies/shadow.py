"""A second policy that decides each request too, and whose decisions are only compared.

It sees the same requests, views and outcomes as the policy that serves. Its failures are counted
and change nothing, even where its code would end the process. What an answer would have taken at
its choice is not known: the times to the first token of requests on which both agree, and of the
others, are a hint.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import TypeVar

from banaserve_route.policies.interface import (
    FleetView,
    Flight,
    Need,
    ReplicaId,
    ReplicaPolicy,
    Request,
    RoutingDecision,
    State,
)
from banaserve_route.policies.prefixes.peers import PeerPrefixes, SharesPrefixes

Value = TypeVar("Value")


class ShadowChoice(StrEnum):
    """Choice of the shadow policy, compared with the target that serves."""

    SAME = "same"
    OTHER = "other"
    HELD = "held"
    FAILED = "failed"


@dataclass(slots=True)
class ShadowCount:
    """Requests with one kind of choice.

    Attributes:
        first_token_s: Sum of their times from sending to first token, in seconds.
        num_first_tokens: Number of requests in that sum.
    """

    num_requests: int = 0
    first_token_s: float = 0.0
    num_first_tokens: int = 0


@dataclass
class ShadowedPolicy:
    """Policy that serves, with a shadow policy beside it.

    Attributes:
        counts: Requests by the shadow's choice.
        num_failed_events: Number of outcomes that the shadow failed to take in.
    """

    serving: ReplicaPolicy
    shadow: ReplicaPolicy
    counts: dict[ShadowChoice, ShadowCount] = field(
        default_factory=lambda: {choice: ShadowCount() for choice in ShadowChoice}
    )
    num_failed_events: int = 0
    _last: tuple[Request, ReplicaId | None, bool] | None = None
    _flights: dict[int, ShadowChoice] = field(default_factory=dict)

    def __post_init__(self) -> None:
        # A shadow compares prefixes of peers only if the serving policy has them exchanged.
        self.needs = self.serving.needs | (self.shadow.needs - {Need.PEER_PREFIXES})
        self.unit_bytes = self.serving.unit_bytes

    def choose(self, request: Request, fleet: FleetView) -> RoutingDecision:
        decision = self.serving.choose(request, fleet)
        if decision.target is not None:
            try:
                self._last = (request, self.shadow.choose(request, fleet).target, False)
            except (Exception, SystemExit):
                self._last = (request, None, True)
        return decision

    def on_sent(self, flight: Flight) -> None:
        self.serving.on_sent(flight)
        self._tell(self.shadow.on_sent, flight)
        if self._last is None or self._last[0] is not flight.request:
            return
        _, target, has_failed = self._last
        self._last = None
        choice = ShadowChoice.SAME if target == flight.target else ShadowChoice.OTHER
        if target is None:
            choice = ShadowChoice.FAILED if has_failed else ShadowChoice.HELD
        self.counts[choice].num_requests += 1
        self._flights[id(flight)] = choice

    def on_first_token(self, flight: Flight) -> None:
        self.serving.on_first_token(flight)
        self._tell(self.shadow.on_first_token, flight)
        choice = self._flights.get(id(flight))
        if choice is not None and flight.first_token_s is not None:
            count = self.counts[choice]
            count.first_token_s += flight.first_token_s - flight.sent_s
            count.num_first_tokens += 1

    def on_finished(self, flight: Flight) -> None:
        self._flights.pop(id(flight), None)
        self.serving.on_finished(flight)
        self._tell(self.shadow.on_finished, flight)

    def on_failed(self, flight: Flight) -> None:
        self._flights.pop(id(flight), None)
        self.serving.on_failed(flight)
        self._tell(self.shadow.on_failed, flight)

    def on_replica_gone(self, target: ReplicaId) -> None:
        self.serving.on_replica_gone(target)
        self._tell(self.shadow.on_replica_gone, target)

    def tick(self, now_s: float) -> None:
        self.serving.tick(now_s)
        self._tell(self.shadow.tick, now_s)

    def hold_safe(self, is_held: bool) -> None:
        self.serving.hold_safe(is_held)

    def state(self) -> State:
        return self.serving.state()

    def restore(self, state: State) -> None:
        self.serving.restore(state)

    def share_prefixes(self, prefixes: PeerPrefixes) -> None:
        """Give the peers' prefixes to the policy that serves, which needs them."""
        assert isinstance(self.serving, SharesPrefixes)
        self.serving.share_prefixes(prefixes)

    def _tell(self, event: Callable[[Value], None], value: Value) -> None:
        try:
            event(value)
        except (Exception, SystemExit):
            self.num_failed_events += 1
