"""Power of two choices: the less loaded of two replicas drawn at random."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from banaserve.orchestrator.replicas.interface import (
    FleetView,
    Need,
    ReplicaView,
    Request,
    RoutingDecision,
    RoutingReason,
)
from banaserve.orchestrator.replicas.policy import NoOptions, Policy
from banaserve.orchestrator.replicas.registry import register


@register("power_of_two")
class PowerOfTwo(Policy):
    """Two different replicas, then the one with fewer outstanding requests.

    Mitzenmacher 2001: the second choice brings most of the balance that looking at all would,
    and counters that are a little old do no harm, since the requests do not all go to one minimum.
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
