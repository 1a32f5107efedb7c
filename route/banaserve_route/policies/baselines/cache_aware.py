"""Cache-aware routing as in SGLang's router, whose versions have different defaults."""

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
from banaserve_route.policies.policy import check_range
from banaserve_route.policies.prefixes.tree_policy import TreeOptions, TreePolicy
from banaserve_route.policies.registry import register


@dataclass(frozen=True, slots=True)
class CacheAwareOptions(TreeOptions):
    """Options of ``cache_aware``.

    Attributes:
        cache_threshold: Share of the prompt above which a hit decides.
        balance_abs: Difference of outstanding requests between the most and the least loaded
            replica above which replicas may be out of balance.
        balance_rel: Ratio of these requests above which, together with ``balance_abs``, they are
            out of balance: then the least loaded replica is taken.
        fills_smallest_tree: True to take the replica with the smallest tree if there is no hit,
            False for the least loaded one.
    """

    cache_threshold: float = 0.3
    balance_abs: int = 64
    balance_rel: float = 1.5
    fills_smallest_tree: bool = False

    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        check_range(
            self, {"cache_threshold": (0, 1), "balance_abs": (0, 1e9), "balance_rel": (1, 1e9)}
        )


@register("cache_aware")
class CacheAware(TreePolicy):
    """Policy by prefixes while the replicas are in balance, and by least load while they are not.

    Among replicas with equal hits, the least loaded one is taken; SGLang takes the one seen last,
    which keeps a hot prefix at one replica.
    """

    PRESETS: ClassVar[Mapping[str, Any]] = {
        "repaired": CacheAwareOptions(balance_abs=8),
        "sglang-0.4": CacheAwareOptions(
            trims=False,
            cache_threshold=0.5,
            balance_abs=32,
            balance_rel=1.0001,
            fills_smallest_tree=True,
        ),
        "sglang-cli": CacheAwareOptions(
            max_tree_bytes=1 << 26, trims=False, fills_smallest_tree=True
        ),
        "sglang-rust": CacheAwareOptions(
            trims=False,
            cache_threshold=0.5,
            balance_abs=32,
            balance_rel=1.1,
            fills_smallest_tree=True,
        ),
        "smg": CacheAwareOptions(max_tree_bytes=1 << 26, trims=False),
    }

    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> RoutingDecision:
        options = self.options
        loads = [view.outstanding for view in candidates]
        low, high = min(loads), max(loads)
        hits = self.hits(request)
        if high - low > options.balance_abs and high > options.balance_rel * low:
            target = candidates[self.least(loads)].id
            return RoutingDecision(target, RoutingReason.IMBALANCE, hits.get(target, 0))
        longest = self.longest_hit(candidates, hits)
        if longest is not None and longest[1] > options.cache_threshold * request.num_tokens:
            return RoutingDecision(longest[0].id, RoutingReason.PREFIX, longest[1])
        if options.fills_smallest_tree:
            loads = [self.tree.target_bytes(view.id) for view in candidates]
        target = candidates[self.least(loads)].id
        return RoutingDecision(target, RoutingReason.EXPLORE, hits.get(target, 0))
