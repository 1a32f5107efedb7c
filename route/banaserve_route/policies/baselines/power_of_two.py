"""Power of two choices: the less loaded of two replicas drawn at random."""

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


@register("power_of_two")
class PowerOfTwo(Policy):
    """Policy that draws two different replicas and takes the one with fewer outstanding requests.

    Mitzenmacher 2001: two choices give most of the balance of examining all replicas, and slightly
    stale counters do no harm, since not all requests go to one minimum.
    """

    PRESETS: ClassVar[Mapping[str, Any]] = {"plain": NoOptions()}
    needs: frozenset[Need] = frozenset()

    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> RoutingDecision:
        if len(candidates) == 1:
            return RoutingDecision(candidates[0].id, RoutingReason.ONLY_CHOICE)
        first = int(self.generator.random() * len(candidates))
        step = 1 + int(self.generator.random() * (len(candidates) - 1))
        two = [candidates[first], candidates[(first + step) % len(candidates)]]
        place = self.least([view.outstanding for view in two])
        return RoutingDecision(two[place].id, RoutingReason.LEAST_LOADED)
