"""Session affinity: a table of sessions and the replicas that served them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from banaserve_route.policies.interface import (
    FleetView,
    Flight,
    ReplicaId,
    ReplicaView,
    Request,
    RoutingDecision,
    RoutingReason,
)
from banaserve_route.policies.policy import Policy, check_range
from banaserve_route.policies.registry import register
from banaserve_route.policies.ring import hash_of, session_key


@dataclass(frozen=True, slots=True)
class SessionAffinityOptions:
    """Options of ``session_affinity``.

    Attributes:
        max_sessions: Maximum number of sessions in the table; beyond it, the least recently used
            session is forgotten.
        modulo: True for GORGO's baseline: the hash of the session's key (without a session, of the
            prompt's first 256 tokens), modulo the number of replicas. It has no table, and nearly
            every session moves when a replica joins or dies.
    """

    max_sessions: int = 100_000
    modulo: bool = False

    def __post_init__(self) -> None:
        check_range(self, {"max_sessions": (1, 1e9)})


@register("session_affinity")
class SessionAffinity(Policy):
    """Policy that sends a new session to the least loaded replica, where the session stays."""

    PRESETS: ClassVar[Mapping[str, Any]] = {
        "repaired": SessionAffinityOptions(),
        "as-coded": SessionAffinityOptions(modulo=True),
    }

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._home: OrderedDict[int, ReplicaId] = OrderedDict()

    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> RoutingDecision:
        if self.options.modulo:
            place = self._key(request) % len(candidates)
            return RoutingDecision(candidates[place].id, RoutingReason.SESSION)
        home = self._home.get(self._key(request))
        if home is not None and any(view.id == home for view in candidates):
            return RoutingDecision(home, RoutingReason.SESSION)
        place = self.least([view.outstanding for view in candidates])
        return RoutingDecision(candidates[place].id, RoutingReason.LEAST_LOADED)

    def on_sent(self, flight: Flight) -> None:
        if self.options.modulo:
            return
        key = self._key(flight.request)
        self._home[key] = flight.target
        self._home.move_to_end(key)
        if len(self._home) > self.options.max_sessions:
            self._home.popitem(last=False)

    def on_replica_gone(self, target: ReplicaId) -> None:
        for key in [key for key, home in self._home.items() if home == target]:
            del self._home[key]

    def _key(self, request: Request) -> int:
        return hash_of(session_key(request, self.unit_bytes))
