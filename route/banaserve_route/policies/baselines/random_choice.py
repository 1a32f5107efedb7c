"""Random choice: any replica, each with the same probability."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from banaserve_route.policies.interface import (
    FleetView,
    Need,
    ReplicaView,
    Request,
    RoutingDecision,
    RoutingReason,
)
from banaserve_route.policies.policy import NoOptions, Policy
from banaserve_route.policies.registry import register


@register("random")
class RandomChoice(Policy):
    """Policy that draws one replica for each request."""

    PRESETS: ClassVar[Mapping[str, Any]] = {"plain": NoOptions()}
    needs: frozenset[Need] = frozenset()

    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> RoutingDecision:
        return RoutingDecision(self.any_of(candidates).id, RoutingReason.RANDOM)
