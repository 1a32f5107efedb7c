"""Least load: the replica with the least work ahead, in milliseconds."""

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
class LeastLoadOptions:
    """Options of ``least_load``.

    Attributes:
        prefill_ms_per_token: Time of a prompt token that is not cached.
        output_ms_per_token: Time of an output token: its share of the steps that it takes part in.
        adds_units: True to add requests, KV tokens and queued tokens without conversion, as GORGO's
            code does, so that the KV tokens decide.
        kv_capacity_tokens: KV capacity of a replica for ``adds_units``, in tokens.
    """

    prefill_ms_per_token: float = 0.094
    output_ms_per_token: float = 0.5
    adds_units: bool = False
    kv_capacity_tokens: int = 200_000

    def __post_init__(self) -> None:
        check_range(
            self,
            {
                "prefill_ms_per_token": (0, 1e6),
                "output_ms_per_token": (0, 1e6),
                "kv_capacity_tokens": (1, 1e12),
            },
        )


@register("least_load")
class LeastLoad(Policy):
    """Policy by the time of the remaining prefill plus the expected output of each replica."""

    PRESETS: ClassVar[Mapping[str, Any]] = {
        "repaired": LeastLoadOptions(),
        "as-coded": LeastLoadOptions(adds_units=True),
    }
    needs: frozenset[Need] = frozenset({Need.REQUEST, Need.REPORTS})

    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> RoutingDecision:
        if self.options.adds_units:
            loads = [self._added(view) for view in candidates]
            return RoutingDecision(candidates[self.least(loads)].id, RoutingReason.LEAST_LOADED)
        prefill, output = self.options.prefill_ms_per_token, self.options.output_ms_per_token
        loads = [
            prefill * view.uncached_tokens + output * view.output_tokens for view in candidates
        ]
        target = candidates[self.least(loads)].id
        scores = {view.id: load for view, load in zip(candidates, loads, strict=True)}
        return RoutingDecision(target, RoutingReason.LEAST_LOADED, scores_ms=scores)

    def _added(self, view: ReplicaView) -> float:
        kv_tokens = view.kv_used_fraction * self.options.kv_capacity_tokens
        return view.running + view.pending + kv_tokens + view.outstanding_tokens
