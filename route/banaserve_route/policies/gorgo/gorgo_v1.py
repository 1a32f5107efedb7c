"""GORGO v1: a balancer in each region that weighs its own region against peers, or a central proxy.

The paper has cost(region) = network latency + t_p x prefill + q_s x queue wait. The queue is the
local one in the formula and the peer's in the text; the code counts the local load and no peer's,
so it forwards too much. In the repaired form, every candidate has the same three terms, all in
milliseconds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from banaserve_route.policies.interface import (
    FleetView,
    Flight,
    Need,
    PeerView,
    ReplicaId,
    ReplicaView,
    Request,
    RoutingDecision,
    RoutingReason,
)
from banaserve_route.policies.policy import check_range
from banaserve_route.policies.prefixes.tree_policy import TreeOptions, TreePolicy
from banaserve_route.policies.registry import register

_MEAN_WEIGHT = 0.02


@dataclass(frozen=True, slots=True)
class GorgoV1Options(TreeOptions):
    """Options of ``gorgo_v1``.

    Attributes:
        prefill_ms_per_token: Prefill time of a token, t_p.
        queue_ms_per_token: Waiting time for a token ahead, t_p x q_s.
        max_outstanding: Number of outstanding requests below which, together with
            ``max_kv_fraction``, a replica has room. The code's 5 leaves an engine that could batch
            dozens of requests half empty, and the other requests in the queue.
        max_kv_fraction: Share of KV memory in use below which a replica has room.
        is_proxy: True for one balancer of all regions: every replica is a candidate, with its
            round-trip time.
        counts_peer_load: True if a peer's load counts; else a peer costs its round trip and its
            prefill only.
        counts_cached: True if the backlog is all outstanding prompt tokens, False if only those not
            yet computed.
        only_matching_peers: True if peers without a hit are candidates only if no peer has one.
    """

    prefill_ms_per_token: float = 0.094
    queue_ms_per_token: float = 0.094
    max_outstanding: int = 32
    max_kv_fraction: float = 0.95
    is_proxy: bool = False
    counts_peer_load: bool = True
    counts_cached: bool = False
    only_matching_peers: bool = False

    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        check_range(
            self,
            {
                "prefill_ms_per_token": (0, 1e6),
                "queue_ms_per_token": (0, 1e6),
                "max_outstanding": (1, 1e9),
                "max_kv_fraction": (0, 1),
            },
        )


_CODED: Mapping[str, Any] = {"trims": False, "counts_cached": True}
_FIVE: Mapping[str, Any] = {"max_outstanding": 5, "counts_peer_load": False, **_CODED}


@register("gorgo_v1")
class GorgoV1(TreePolicy):
    """Policy that serves in its region while a replica there has room, else at the lowest cost.

    Staying means waiting in the queue, whose tokens count as ahead. The 150.72 ms that the paper's
    fit adds to every prefill are equal for all candidates and left out. The paper's code forgets
    the targets of a prefix when a tree node is split; the tree here does not, in any preset.
    """

    PRESETS: ClassVar[Mapping[str, Any]] = {
        "repaired": GorgoV1Options(),
        "as-coded": GorgoV1Options(only_matching_peers=True, **_FIVE),
        "published": GorgoV1Options(**_FIVE),
        "proxy": GorgoV1Options(is_proxy=True, max_outstanding=10),
        "proxy-as-coded": GorgoV1Options(is_proxy=True, max_outstanding=10, **_CODED),
    }
    needs: frozenset[Need] = frozenset({Need.REQUEST, Need.REPORTS, Need.CACHES, Need.PEERS})

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._mean_tokens = 0.0

    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> RoutingDecision:
        hits = self.hits(request)
        local = [view for view in candidates if not isinstance(view, PeerView)]
        roomy = [view for view in local if self._has_room(view)]
        if self.options.is_proxy or roomy:
            return self._lowest(request, roomy, hits)
        peers = [view for view in candidates if isinstance(view, PeerView)]
        if self.options.only_matching_peers:
            peers = [view for view in peers if view.id in hits] or peers
        return self._stay_or_go(request, local, peers, hits, fleet)

    def on_sent(self, flight: Flight) -> None:
        super().on_sent(flight)
        tokens = flight.request.num_tokens
        known = self._mean_tokens or tokens
        self._mean_tokens = known + _MEAN_WEIGHT * (tokens - known)

    def _lowest(
        self, request: Request, views: Sequence[ReplicaView], hits: dict[ReplicaId, int]
    ) -> RoutingDecision:
        if not views:
            return RoutingDecision(None, RoutingReason.ALL_BUSY)
        costs = [self._cost(request, view, hits) for view in views]
        target = views[self.least(costs)].id
        scores = {view.id: cost for view, cost in zip(views, costs, strict=True)}
        return RoutingDecision(target, RoutingReason.LOWEST_COST, hits.get(target, 0), scores)

    def _stay_or_go(
        self,
        request: Request,
        local: Sequence[ReplicaView],
        peers: Sequence[ReplicaView],
        hits: dict[ReplicaId, int],
        fleet: FleetView,
    ) -> RoutingDecision:
        if not peers:
            return RoutingDecision(None, RoutingReason.ALL_BUSY)
        queued_ms = (
            self.options.queue_ms_per_token * self._mean_tokens * fleet.queue_length
        ) / max(1, len(local))
        stay = [self._cost(request, view, hits) + queued_ms for view in local]
        away = self._lowest(request, peers, hits)
        assert away.target is not None
        if stay and min(stay) <= away.scores_ms[away.target]:
            return RoutingDecision(None, RoutingReason.ALL_BUSY)
        return RoutingDecision(
            away.target, RoutingReason.FORWARDED, away.hit_tokens, away.scores_ms
        )

    def _cost(self, request: Request, view: ReplicaView, hits: dict[ReplicaId, int]) -> float:
        options = self.options
        missed = request.num_tokens - hits.get(view.id, 0)
        cost: float = view.round_trip_ms + options.prefill_ms_per_token * missed
        if isinstance(view, PeerView) and not options.counts_peer_load:
            return cost
        ahead: float = view.outstanding_tokens if options.counts_cached else view.uncached_tokens
        if isinstance(view, PeerView):
            # Of requests that others sent there, only the number is known, over all its replicas.
            waiting = max(view.queue_length + view.pending - view.prefilling, 0)
            ahead += self._mean_tokens * waiting
        return cost + options.queue_ms_per_token * ahead

    def _has_room(self, view: ReplicaView) -> bool:
        options = self.options
        return (
            view.outstanding < options.max_outstanding
            and view.kv_used_fraction < options.max_kv_fraction
        )
