"""SkyWalker (EuroSys'26): two layers, selective pushing, prefixes or a hash ring.

A request goes to a replica of this region that can start it at once, else to the balancer of a
region with such replicas, else it stays in the queue (the paper's listing does not cover this
case).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
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
from banaserve_route.policies.policy import Policy, check_choice, check_range, may_serve
from banaserve_route.policies.prefixes.peers import PeerPrefixes
from banaserve_route.policies.prefixes.tree import FIFO
from banaserve_route.policies.prefixes.tree_policy import TreeOptions, TreePolicy
from banaserve_route.policies.registry import register
from banaserve_route.policies.ring import Ring, session_key

PENDING, OUTSTANDING, BLIND = "pending", "outstanding", "blind"

Filter = Callable[[Sequence[ReplicaView], FleetView], Iterator[ReplicaView]]
"""Function that yields the targets of a layer that accept more requests."""


@dataclass(frozen=True, slots=True)
class SkyWalkerOptions(TreeOptions):
    """Options of ``skywalker``.

    Attributes:
        push: Condition on which a replica accepts more requests: ``pending`` (SP-P: it reports no
            pending request), ``outstanding`` (SP-O: it has fewer than ``max_outstanding``) or
            ``blind`` (always).
        max_outstanding: Limit of SP-O, and of SP-P while a replica has not reported for
            ``stale_after_s``, as it does not during a long step.
        max_unreported: Maximum number of outstanding requests at a replica that its last report
            cannot include; those forwarded to a peer count as in its queue, except for one for each
            of its free replicas. 0: no such count, as in the paper, whose bursts between two
            reports go to one target as a whole.
        stale_after_s: Age of a report, in seconds, above which it is ignored.
        tau: Maximum queue length of a peer that gets requests.
        compares_queues: True if a peer with a longer queue than this balancer's gets no requests.
        prefix_threshold: Share of the prompt above which a hit decides; else the fewest outstanding
            requests decide.
        peer_snapshots: True if peers exchange the prefixes sent to their replicas
            (``PeerPrefixes``). The paper's balancer only knows the prefixes that it forwarded.
        virtual_nodes: Number of points of each target on the ring of ``skywalker_ch``.
    """

    push: str = PENDING
    max_outstanding: int = 10
    max_unreported: int = 16
    stale_after_s: float = 2.0
    tau: int = 10
    compares_queues: bool = True
    prefix_threshold: float = 0.5
    peer_snapshots: bool = True
    virtual_nodes: int = 64

    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        check_choice("push", self.push, (PENDING, OUTSTANDING, BLIND))
        check_range(
            self,
            {
                "max_outstanding": (1, 1e9),
                "max_unreported": (0, 1e9),
                "stale_after_s": (0.001, 1e9),
                "tau": (0, 1e9),
                "prefix_threshold": (0, 1),
                "virtual_nodes": (1, 100_000),
            },
        )


PRESETS = {
    "repaired": SkyWalkerOptions(),
    "published": SkyWalkerOptions(
        max_unreported=0,
        stale_after_s=1e9,
        compares_queues=False,
        eviction=FIFO,
        trims=False,
        peer_snapshots=False,
    ),
    "as-coded": SkyWalkerOptions(
        max_unreported=0,
        stale_after_s=1e9,
        trims=False,
        peer_snapshots=False,
        virtual_nodes=1,
    ),
}


@register("skywalker")
class SkyWalker(TreePolicy):
    """Variant with prefixes; peers are targets in the same tree, by requests forwarded to them."""

    PRESETS: ClassVar[Mapping[str, Any]] = PRESETS
    needs: frozenset[Need] = frozenset(
        {Need.REQUEST, Need.REPORTS, Need.CACHES, Need.PEERS, Need.PEER_PREFIXES}
    )

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        if not self.options.peer_snapshots:
            self.needs = self.needs - {Need.PEER_PREFIXES}
        self._peer_prefixes: PeerPrefixes | None = None
        self._hits: dict[ReplicaId, int] | None = None

    def share_prefixes(self, prefixes: PeerPrefixes) -> None:
        """Set ``prefixes``, which records requests sent here for peers and holds the peers' own."""
        self._peer_prefixes = prefixes

    def choose(self, request: Request, fleet: FleetView) -> RoutingDecision:
        # Few replicas have enough of the prompt, and one of them gets most requests: they are
        # tried first, and the others only if none of them is free. Long prompts that wait are not
        # matched repeatedly while no target is free.
        self._hits = None
        if not fleet.queue_length or any(
            view.is_available for view in self._free(fleet.replicas, fleet)
        ):
            self._hits = hits = self.hits(request)
            views = [fleet.by_id.get(one) for one in sorted(self._enough(request, hits))]
            have = [one for one in views if one and one.is_available and may_serve(one, request)]
            longest = self.longest_hit(list(self._free(have, fleet)), hits) if have else None
            if longest is not None:
                return RoutingDecision(longest[0].id, RoutingReason.PREFIX, longest[1])
        return super().choose(request, fleet)

    def on_sent(self, flight: Flight) -> None:
        super().on_sent(flight)
        shared = self._peer_prefixes
        if shared is not None and flight.decision.reason is not RoutingReason.FORWARDED:
            shared.sent(flight.request, flight.target)

    def on_replica_gone(self, target: ReplicaId) -> None:
        super().on_replica_gone(target)
        if self._peer_prefixes is not None:
            self._peer_prefixes.forget(target)

    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> RoutingDecision:
        local, peers = candidates, []
        if fleet.peers:
            local = [view for view in candidates if not isinstance(view, PeerView)]
            peers = [view for view in candidates if isinstance(view, PeerView)]
        found = self.among(request, local, fleet, self._free)
        if found is None and peers:
            found = self.among(request, peers, fleet, self._open)
            if found is not None:
                return RoutingDecision(found.target, RoutingReason.FORWARDED, found.hit_tokens)
        return found or RoutingDecision(None, RoutingReason.ALL_BUSY)

    def among(
        self, request: Request, layer: Sequence[ReplicaView], fleet: FleetView, takes_more: Filter
    ) -> RoutingDecision | None:
        """Return the choice in one layer; None if no target accepts more requests."""
        free = list(takes_more(layer, fleet))
        if not free:
            return None
        hits = self.hits(request) if self._hits is None else self._hits
        if isinstance(free[0], PeerView):
            if self._peer_prefixes is not None:
                told = self._peer_prefixes.hits(request)
                hits = {one: max(hits.get(one, 0), told.get(one, 0)) for one in hits.keys() | told}
            longest = self.longest_hit(free, self._enough(request, hits))
            if longest is not None:
                return RoutingDecision(longest[0].id, RoutingReason.PREFIX, longest[1])
        target = free[self.least([view.outstanding for view in free])].id
        return RoutingDecision(target, RoutingReason.EXPLORE, hits.get(target, 0))

    def _enough(self, request: Request, hits: dict[ReplicaId, int]) -> dict[ReplicaId, int]:
        """Return the ``hits`` above the threshold, which decide."""
        limit = self.options.prefix_threshold * request.num_tokens
        return {one: hit for one, hit in hits.items() if hit > limit}

    def _free(self, views: Sequence[ReplicaView], fleet: FleetView) -> Iterator[ReplicaView]:
        """Yield the ``views``, replicas of this region, that accept more requests."""
        options = self.options
        since_s = fleet.now_s - options.stale_after_s
        most, limit = options.max_outstanding, options.max_unreported or float("inf")
        if options.push == BLIND:
            return iter(views)
        if options.push == OUTSTANDING:
            return (view for view in views if view.outstanding < most)
        return (
            view
            for view in views
            if (
                view.pending == 0 and _unreported(view) < limit
                if (at_s := view.reported_at_s) is not None and at_s >= since_s
                else view.outstanding < most
            )
        )

    def _open(self, peers: Sequence[ReplicaView], fleet: FleetView) -> Iterator[ReplicaView]:
        """Yield the peers that accept more requests."""
        return (one for one in peers if isinstance(one, PeerView) and self._is_open(one, fleet))

    def _is_open(self, peer: PeerView, fleet: FleetView) -> bool:
        if self.options.push == BLIND:
            return True
        limit = self.options.tau
        if self.options.compares_queues:
            limit = min(limit, fleet.queue_length)
        queued = peer.queue_length
        if self.options.max_unreported:
            queued += max(0, _unreported(peer) - peer.num_available)
        return peer.num_available >= 1 and queued <= limit


def _unreported(view: ReplicaView) -> int:
    """Return how many outstanding requests the target's last report may not include."""
    return min(view.sent_since_report, view.outstanding)


@register("skywalker_ch")
class SkyWalkerCH(SkyWalker):
    """Variant with a hash ring in each layer; unavailable targets are skipped."""

    needs: frozenset[Need] = SkyWalker.needs - {Need.CACHES, Need.PEER_PREFIXES}

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._rings = {kind: Ring(self.options.virtual_nodes) for kind in (False, True)}

    def choose(self, request: Request, fleet: FleetView) -> RoutingDecision:
        return Policy.choose(self, request, fleet)

    def among(
        self, request: Request, layer: Sequence[ReplicaView], fleet: FleetView, takes_more: Filter
    ) -> RoutingDecision | None:
        free = list(takes_more(layer, fleet))
        if not free:
            return None
        is_peer = isinstance(free[0], PeerView)
        everyone: Sequence[ReplicaView] = fleet.peers if is_peer else fleet.replicas
        key = session_key(request, self.unit_bytes)
        if not key:
            place = self.least([view.outstanding for view in free])
            return RoutingDecision(free[place].id, RoutingReason.LEAST_LOADED)
        ring = self._rings[is_peer].over([view.id for view in everyone])
        return RoutingDecision(ring.find(key, {view.id for view in free}), RoutingReason.SESSION)

    def on_sent(self, flight: Any) -> None:
        """Do nothing: the ring needs no record of prompts."""

    def on_finished(self, flight: Any) -> None:
        """Do nothing: there is no record to correct."""
