"""Round robin: the replica chosen longest ago."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from banaserve_route.policies.interface import (
    FleetView,
    Flight,
    Need,
    ReplicaId,
    ReplicaView,
    Request,
    RoutingDecision,
    RoutingReason,
)
from banaserve_route.policies.policy import NoOptions, Policy
from banaserve_route.policies.registry import register


@register("round_robin")
class ReplicaRoundRobin(Policy):
    """Policy that takes turns; a replica that was unavailable has its turn once it returns."""

    PRESETS: ClassVar[Mapping[str, Any]] = {"plain": NoOptions()}
    needs: frozenset[Need] = frozenset()

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._turn = 0
        self._sent_at: dict[ReplicaId, int] = {}

    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> RoutingDecision:
        sent_at = self._sent_at
        turns = [sent_at.get(view.id, 0) for view in candidates]
        return RoutingDecision(candidates[turns.index(min(turns))].id, RoutingReason.TURN)

    def on_sent(self, flight: Flight) -> None:
        self._turn += 1
        self._sent_at[flight.target] = self._turn

    def on_replica_gone(self, target: ReplicaId) -> None:
        self._sent_at.pop(target, None)
