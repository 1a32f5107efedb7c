"""Least requests: the replica with the fewest requests on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from banaserve.orchestrator.replicas.interface import (
    Decision,
    FleetView,
    Reason,
    ReplicaView,
    Request,
)
from banaserve.orchestrator.replicas.policy import Policy
from banaserve.orchestrator.replicas.registry import register


@dataclass(frozen=True, slots=True)
class LeastRequestsOptions:
    """Options of ``least_requests``.

    Attributes:
        counts_reported: Where a replica reports more running requests than this balancer has
            sent, those count: somebody else sends there too.
    """

    counts_reported: bool = False


@register("least_requests")
class LeastRequests(Policy):
    """Counts this balancer's outstanding requests, a long one like a short one."""

    PRESETS: ClassVar[Mapping[str, Any]] = {
        "repaired": LeastRequestsOptions(),
        "as-coded": LeastRequestsOptions(counts_reported=True),
    }

    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> Decision:
        if self.options.counts_reported:
            counts = [max(view.outstanding, view.running) for view in candidates]
        else:
            counts = [view.outstanding for view in candidates]
        return Decision(candidates[self.least(counts)].id, Reason.LEAST_LOADED)
