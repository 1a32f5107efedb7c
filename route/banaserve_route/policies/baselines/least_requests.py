"""Least requests: the replica with the fewest requests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from banaserve_route.policies.interface import (
    FleetView,
    Need,
    ReplicaView,
    Request,
    RoutingDecision,
    RoutingReason,
)
from banaserve_route.policies.policy import Policy
from banaserve_route.policies.registry import register


@dataclass(frozen=True, slots=True)
class ReplicaLeastRequestsOptions:
    """Options of ``least_requests``.

    Attributes:
        counts_reported: True to count the running requests that a replica reports if they are more
            than this balancer's outstanding ones: other balancers send there, too.
    """

    counts_reported: bool = False


@register("least_requests")
class ReplicaLeastRequests(Policy):
    """Policy that counts this balancer's outstanding requests, whatever their length."""

    PRESETS: ClassVar[Mapping[str, Any]] = {
        "repaired": ReplicaLeastRequestsOptions(),
        "as-coded": ReplicaLeastRequestsOptions(counts_reported=True),
    }
    needs: frozenset[Need] = frozenset({Need.REPORTS})

    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> RoutingDecision:
        if self.options.counts_reported:
            counts = [max(view.outstanding, view.running) for view in candidates]
        else:
            counts = [view.outstanding for view in candidates]
        return RoutingDecision(candidates[self.least(counts)].id, RoutingReason.LEAST_LOADED)
