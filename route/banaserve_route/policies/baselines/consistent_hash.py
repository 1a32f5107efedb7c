"""Consistent hashing: a session stays with one replica while the set of replicas is the same."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from banaserve_route.policies.interface import (
    FleetView,
    ReplicaView,
    Request,
    RoutingDecision,
    RoutingReason,
)
from banaserve_route.policies.policy import Policy, check_range
from banaserve_route.policies.registry import register
from banaserve_route.policies.ring import Ring, session_key


@dataclass(frozen=True, slots=True)
class ConsistentHashOptions:
    """Options of ``consistent_hash``.

    Attributes:
        virtual_nodes: Number of points of each replica on the ring.
        max_load_factor: Multiple of the mean of outstanding requests above which a replica is
            skipped; 0 disables skipping.
        needs_session: True to send a request without a session to the replica with the fewest
            outstanding requests; else the start of its prompt serves as session key.
    """

    virtual_nodes: int = 64
    max_load_factor: float = 1.25
    needs_session: bool = False

    def __post_init__(self) -> None:
        check_range(self, {"virtual_nodes": (1, 100_000), "max_load_factor": (0, 1e6)})
        if 0 < self.max_load_factor < 1:
            check_range(self, {"max_load_factor": (1, 1e6)})


@register("consistent_hash")
class ConsistentHash(Policy):
    """Policy with Envoy's ring; unavailable replicas are skipped, and regain their keys later.

    By default, full replicas are skipped, too (Mirrokni, Thorup, Zadimoghaddam 2018): a popular key
    then goes to the next replica on the ring, always the same one.
    """

    PRESETS: ClassVar[Mapping[str, Any]] = {
        "repaired": ConsistentHashOptions(),
        "as-coded": ConsistentHashOptions(virtual_nodes=1, max_load_factor=0, needs_session=True),
    }

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._ring = Ring(self.options.virtual_nodes)

    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> RoutingDecision:
        if self.options.needs_session and not request.session:
            place = self.least([view.outstanding for view in candidates])
            return RoutingDecision(candidates[place].id, RoutingReason.LEAST_LOADED)
        # The ring includes unavailable replicas: skipping one moves no other key.
        ring = self._ring.over([view.id for view in fleet.replicas])
        among = self._with_room(candidates)
        key = session_key(request, self.unit_bytes)
        target = ring.find(key, {view.id for view in among})
        return RoutingDecision(target, RoutingReason.SESSION)

    def _with_room(self, candidates: Sequence[ReplicaView]) -> Sequence[ReplicaView]:
        factor = self.options.max_load_factor
        if not factor:
            return candidates
        # The mean includes the request itself, so that at least one target has room.
        mean = (sum(view.outstanding for view in candidates) + 1) / len(candidates)
        return [view for view in candidates if view.outstanding + 1 <= max(1.0, factor * mean)] or (
            candidates
        )
