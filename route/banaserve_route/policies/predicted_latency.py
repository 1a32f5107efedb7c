"""Predicted latency: the replica where a request costs the least time, its own and others'.

    cost = F round trip + 2 c n + w p (missed (1 + n + later) + ahead) + waiting

All in milliseconds, learnt from answers. p is the time of a prompt token that has to be computed:
``missed`` of this request, ``ahead`` of those before it; w is the replica's pace. c is what each of
n requests adds to an answer of mean length: they slow this one, and it slows them as much. Its
prefill holds up the n requests, and those that come later, as long as anything is left to compute.
F counts the requests that will follow this one for its prefix. ``waiting`` is for a place in a full
batch.

Costs that differ by less than a millisecond are equal, and one of them is taken at random.
Otherwise microseconds of round trip, or the few tokens with which every chat begins, would send
all of a light load to one replica and leave the caches of the others empty. If a replica reports
fewer cached tokens than were sent there, its cache is too small for its sessions: expected hits
there count less than at replicas that keep more, and some sessions move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import msgspec

from banaserve._native import Line, request_costs
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

_FEW = 4
"""Number of replicas with the longest prefix, and of others at random, compared in large fleets."""

_FUTURE = 2.0
_LEAST_PLACES = 16.0
"""Size of a batch before a larger one has been reported."""

_OUTLIER = 5.0
"""Ratio to the predicted time at which a time to first token is cut off."""

_LEARNING = 0.02
_FAST_LEARNING = 0.05
_KEEPING = 0.02
"""Weight of a new value in means of the expected prefix tokens that a replica still has."""

_KEEPS = 0.98
"""Share of the most that any replica keeps, above which a replica counts as keeping all."""

_PACE_PER_TICK = 0.98
"""Rest of the difference to the fleet's pace after a tick: a slow replica is tried again."""


@dataclass(frozen=True, slots=True)
class PredictedLatencyOptions(TreeOptions):
    """Options of ``predicted_latency``.

    Attributes:
        prefill_ms_per_token: Prefill time of a token, assumed until it is measured.
        others: Weight of the time that a request costs the others at its replica: 0 for the lowest
            latency of each request by itself.
    """

    prefill_ms_per_token: float = 0.05
    others: float = 1.0

    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        check_range(self, {"prefill_ms_per_token": (1e-6, 1e6), "others": (0, 100)})


class _Hit(msgspec.Struct):
    """What was known of a request's prefix: tokens at its target, most tokens at any replica.

    ``sent`` counts the tokens that had been sent to the target, kept or not.
    """

    sent: int
    here: int
    longest: int
    is_full: bool


@register("predicted_latency")
class PredictedLatency(TreePolicy):
    """Policy of a balancer for its replicas and peers.

    A prefix that other replicas hold costs the share ``fetch_fraction`` of its prefill: 1, or less
    if it turns out that replicas share a store.
    """

    PRESETS: ClassVar[Mapping[str, Any]] = {"learnt": PredictedLatencyOptions()}
    needs: frozenset[Need] = frozenset({Need.REQUEST, Need.REPORTS, Need.CACHES, Need.PEERS})

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.first_token_ms = Line(self.options.prefill_ms_per_token, 1000.0)
        self.output_ms = Line(0.1, 1.0)
        self.fetch_fraction = 1.0
        self._mean_missed = self._mean_output = self._hit_fraction = 0.0
        self._answer_ms = self._prefill_ms = 0.0
        self._places = _LEAST_PLACES
        self._paces: dict[ReplicaId, float] = {}
        self._kept: dict[ReplicaId, float] = {}
        self._losing: dict[ReplicaId, float] = {}
        self._sent_hits: dict[ReplicaId, int] = {}
        self._hits: dict[ReplicaId, int] = {}
        self._longest = 0
        self._full: list[ReplicaId] = []
        self._sent: dict[int, _Hit] = {}

    def choose(self, request: Request, fleet: FleetView) -> RoutingDecision:
        self._sent_hits = self.hits(request)
        self._hits = self._kept_of(self._sent_hits) if self._losing else self._sent_hits
        self._longest = max(self._hits.values()) if self._hits else 0
        if len(fleet.replicas) > 2 * _FEW:
            decision = super().choose(request, self._few(fleet))
            if decision.target is not None:
                return decision
        return super().choose(request, fleet)

    def _kept_of(self, hits: dict[ReplicaId, int]) -> dict[ReplicaId, int]:
        """Return ``hits``, fewer for replicas that keep less than the one that keeps most."""
        share_of = self._losing.get
        return {name: int(hit * share_of(name, 1.0)) for name, hit in hits.items()}

    def _few(self, fleet: FleetView) -> FleetView:
        """Return ``fleet`` with a part of its replicas."""
        views, draw = fleet.replicas, self.generator.random()
        few = {}
        if self._hits:
            best = [one for one, hit in self._hits.items() if hit == self._longest]
            first = int(draw * len(best))
            for one in (best[first:] + best[:first])[:_FEW]:
                if one in fleet.by_id:
                    few[one] = fleet.by_id[one]
        first = int(draw * len(views))
        for number in range(_FEW):
            view = views[(first + number * len(views) // _FEW) % len(views)]
            few[view.id] = view
        return FleetView(
            fleet.now_s,
            fleet.region,
            fleet.queue_length,
            list(few.values()),
            fleet.peers,
            fleet.by_id,
        )

    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> RoutingDecision:
        longest, tokens, fetch = self._longest, request.num_tokens, self.fetch_fraction
        self._hit_fraction += _LEARNING * (longest / tokens - self._hit_fraction)
        others = self.options.others
        costs, cheapest, self._places, self._full = request_costs(
            candidates,
            self._hits,
            self._paces,
            {peer.id: self._of_a_replica(peer) for peer in fleet.peers},
            # What this request would miss at a replica that has nothing of its prompt.
            least_missed=tokens - longest * (1 - fetch),
            fetch=fetch,
            future=min(_FUTURE, 1 / max(1e-3, 1 - self._hit_fraction)),
            crowd=2 * others * self.output_ms.slope * self._mean_output,
            prefill=self.first_token_ms.slope,
            others=others,
            places=self._places,
            answer_ms=self._answer_ms,
        )
        target = self.any_of(cheapest)
        is_far = type(target) is PeerView
        missed = tokens - longest + fetch * (longest - self._hits.get(target.id, 0))
        return RoutingDecision(
            target.id,
            RoutingReason.FORWARDED if is_far else RoutingReason.LOWEST_COST,
            max(0, tokens - round(missed)),
            costs,
        )

    def _of_a_replica(self, peer: PeerView) -> tuple[float, float]:
        """Return requests and tokens ahead of a mean replica of ``peer``."""
        replicas, ahead = max(1, peer.num_replicas), float(peer.uncached_tokens)
        if not peer.num_available:
            waiting = peer.pending + peer.queue_length - peer.prefilling
            ahead += self._mean_missed * max(0, waiting)
        count = max(peer.outstanding, peer.running + peer.pending + peer.queue_length)
        return count / replicas, ahead / replicas

    def on_sent(self, flight: Flight) -> None:
        target = flight.target
        sent, here = self._sent_hits.get(target, 0), self._hits.get(target, 0)
        self._sent[id(flight)] = _Hit(sent, here, self._longest, target in self._full)
        missed = flight.request.num_tokens - flight.decision.hit_tokens
        self._mean_missed = _mean(self._mean_missed, missed)
        self.tree.add(flight.request.prompt, target)

    def on_finished(self, flight: Flight) -> None:
        hit = self._sent.pop(id(flight))
        if hit.sent and flight.cached_tokens is not None:
            self._learn_kept(flight.target, flight.cached_tokens / hit.sent)
        if flight.decision.reason is not RoutingReason.FORWARDED:
            self._learn_output(flight)
            if not hit.is_full:
                self._learn_first_token(flight, hit)
        self.correct(flight)

    def on_failed(self, flight: Flight) -> None:
        del self._sent[id(flight)]

    def on_replica_gone(self, target: ReplicaId) -> None:
        super().on_replica_gone(target)
        self._paces.pop(target, None)
        self._kept.pop(target, None)
        self._losing.pop(target, None)

    def tick(self, now_s: float) -> None:
        for target, pace in self._paces.items():
            self._paces[target] = 1 + _PACE_PER_TICK * (pace - 1)

    def _learn_kept(self, target: ReplicaId, share: float) -> None:
        known = self._kept.get(target, 1.0)
        if share >= 1 and known > 0.999 and target in self._kept:
            return
        self._kept[target] = known + _KEEPING * (min(1.0, share) - known)
        most = max(1e-3, *self._kept.values())
        least = _KEEPS * most
        self._losing = {one: kept / most for one, kept in self._kept.items() if kept < least}

    def _learn_output(self, flight: Flight) -> None:
        assert flight.first_token_s is not None
        assert flight.ended_s is not None
        output, rest_ms = flight.output_tokens, 1000 * (flight.ended_s - flight.first_token_s)
        self._mean_output = _mean(self._mean_output, output)
        self._answer_ms = _mean(self._answer_ms, rest_ms)
        if output > 1:
            self.output_ms.learn(flight.outstanding, rest_ms / (output - 1))

    def _learn_first_token(self, flight: Flight, hit: _Hit) -> None:
        assert flight.first_token_s is not None
        taken_ms = 1000 * (flight.first_token_s - flight.sent_s) - flight.round_trip_ms
        cached, tokens = flight.cached_tokens, flight.request.num_tokens
        new, elsewhere = tokens - hit.longest + flight.backlog_tokens, hit.longest - hit.here
        if elsewhere > new / 4:
            share = 1.0
            if cached is None or cached > hit.here + elsewhere / 2:
                fetched_ms = taken_ms - self.first_token_ms(new)
                share = fetched_ms / (self.first_token_ms.slope * elsewhere + 1e-9)
                share = min(1.0, max(0.0, share))
            self.fetch_fraction += _FAST_LEARNING * (share - self.fetch_fraction)
            if share < 1:
                return
        known = flight.decision.hit_tokens if cached is None else cached
        ahead = max(0, tokens - known) + flight.backlog_tokens
        predicted_ms = self.first_token_ms(ahead)
        taken_ms = min(max(0.0, taken_ms), _OUTLIER * predicted_ms + 200)
        self.first_token_ms.learn(ahead, taken_ms)
        self._prefill_ms = _mean(self._prefill_ms, predicted_ms)
        if predicted_ms > 0:
            # Short times say little of a replica's pace.
            weight = _FAST_LEARNING * min(1.0, predicted_ms / self._prefill_ms)
            pace = self._paces.get(flight.target, 1.0)
            self._paces[flight.target] = pace + weight * (taken_ms / predicted_ms - pace)


def _mean(known: float, value: float) -> float:
    """Return the running mean after ``value``, which is the first if the mean is 0."""
    return known + _LEARNING * (value - known) if known else value
