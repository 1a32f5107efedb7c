"""Load-aware routing over replicas: BanaServe Algorithm 2, one request at a time.

The paper's argument is that with a global store every prefix can be read everywhere, so that the
choice depends on load only. This does not hold for clusters without a shared store; for them, this
policy is the load-only baseline.
"""

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
from banaserve_route.policies.policy import Policy, check_range
from banaserve_route.policies.registry import register


@dataclass(frozen=True, slots=True)
class ReplicaLoadAwareOptions:
    """Options of ``load_aware``.

    Attributes:
        delta_l: Load threshold of ``published``, in (0, 2]; 0 for the repaired form, which needs
            none.
        prefill_ms_per_token: Prefill time of a token of the prompts ahead.
        max_running: Maximum number of requests in a replica's batch, vLLM's ``max_num_seqs``.
        full_load_ms: Prefill work ahead that counts as a load of 1, in milliseconds.
        counts_round_trip: True if the round-trip time is added to the prefill work ahead.
    """

    delta_l: float = 0.0
    prefill_ms_per_token: float = 0.094
    max_running: int = 128
    full_load_ms: float = 1000.0
    counts_round_trip: bool = True

    def __post_init__(self) -> None:
        check_range(
            self,
            {
                "delta_l": (0, 2),
                "prefill_ms_per_token": (0, 1e6),
                "max_running": (1, 1e9),
                "full_load_ms": (0.001, 1e9),
            },
        )


@register("load_aware")
class ReplicaLoadAware(Policy):
    """Policy that minimises the greatest of three shares of a replica.

    The shares are KV memory, places in the batch and prefill work ahead. ``published`` adds memory
    and batch (Eq. 37) and, above ``delta_l``, compares queues only.
    """

    PRESETS: ClassVar[Mapping[str, Any]] = {
        "repaired": ReplicaLoadAwareOptions(),
        "published": ReplicaLoadAwareOptions(delta_l=1.3, counts_round_trip=False),
    }
    needs: frozenset[Need] = frozenset({Need.REQUEST, Need.REPORTS})

    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> RoutingDecision:
        if self.options.delta_l:
            return self._published(candidates)
        loads = [self._load(view) for view in candidates]
        return RoutingDecision(candidates[self.least(loads)].id, RoutingReason.LEAST_LOADED)

    def _load(self, view: ReplicaView) -> float:
        options = self.options
        ahead_ms = options.prefill_ms_per_token * view.uncached_tokens
        if options.counts_round_trip:
            ahead_ms += view.round_trip_ms
        # Requests sent since the last report are not in its share of the memory yet.
        share = view.kv_used_fraction / view.running if view.running else 0.0
        coming = max(0, view.outstanding - view.running)
        return max(
            view.kv_used_fraction + coming * share,
            max(view.outstanding, view.running + view.pending) / options.max_running,
            ahead_ms / options.full_load_ms,
        )

    def _published(self, candidates: Sequence[ReplicaView]) -> RoutingDecision:
        loads = [
            view.kv_used_fraction + view.running / self.options.max_running for view in candidates
        ]
        place = self.least(loads)
        if loads[place] < self.options.delta_l:
            return RoutingDecision(candidates[place].id, RoutingReason.LEAST_LOADED)
        place = self.least([view.pending for view in candidates])
        return RoutingDecision(candidates[place].id, RoutingReason.IMBALANCE)
