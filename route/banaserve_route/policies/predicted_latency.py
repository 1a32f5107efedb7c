"""Predicted latency: the replica where a request costs the least time, its own and others'.

The time to first token is predicted from learnt speeds: the round trip, the prompt tokens that the
replica has to compute, and those that it computes before. What a request adds to the others at a
replica counts too, else each would push others' latency up for a small gain of its own.
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
from banaserve_route.policies.rates import Rates
from banaserve_route.policies.registry import register

_LEARNING = 0.05


@dataclass(frozen=True, slots=True)
class PredictedLatencyOptions(TreeOptions):
    """Options of ``predicted_latency``.

    Attributes:
        prefill_ms_per_token: Prefill time of a token, assumed until it is measured.
        others: Weight of the time that a request costs the others at its replica.
    """

    prefill_ms_per_token: float = 0.05
    others: float = 1.0
    crowd: float = 1.0
    rw: float = 3.0
    pw: float = 0.0
    two: int = 0
    first: int = 0

    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        check_range(self, {"prefill_ms_per_token": (1e-6, 1e6), "others": (0, 100)})


@register("predicted_latency")
class PredictedLatency(TreePolicy):
    """Policy of a balancer for its replicas and peers."""

    PRESETS: ClassVar[Mapping[str, Any]] = {"learnt": PredictedLatencyOptions()}
    needs: frozenset[Need] = frozenset({Need.REQUEST, Need.REPORTS, Need.PEERS})

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        prefill_ms = self.options.prefill_ms_per_token
        self.ttft = Line(prefill_ms)
        self.thrash=0.0
        self._reuse=0.0
        self._duration=0.0
        self._places={}; self._seen={}; self._waited={}
        self.fetch_fraction = 1.0
        self._mean_missed = 0.0
        self._mean_output = 0.0
        self._slope = Line(0.1)
        self._hits: dict[int, tuple[int, int]] = {}
        self._last: tuple[int, int] = (0, 0)

    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> RoutingDecision:
        hits = self.hits(request)
        longest = max(hits.values(), default=0)
        new, fetch = request.num_tokens - longest, self.fetch_fraction
        prefill = queue = self.ttft.slope
        import os
        rw=min(self.options.rw,1/max(.01,1-self._reuse))
        self._reuse += 0.02*(longest/request.num_tokens-self._reuse)
        pw=self.options.pw
        others = self.options.others
        crowd = self.options.crowd*self._slope.slope * self._mean_output
        costs, misses = [], []
        for view in candidates:
            missed = new + fetch * (longest - hits.get(view.id, 0))
            backlog, n = view.uncached_tokens, view.outstanding
            if isinstance(view, PeerView):
                replicas = max(1, view.num_replicas)
                if not view.num_available:
                    backlog += self._mean_missed * max(0, view.pending + view.queue_length - view.prefilling)
                backlog /= replicas
                n = max(view.running + view.pending + view.queue_length, n) / replicas
                wait = self._duration/max(1,view.running)*max(0, view.pending+view.queue_length) if not view.num_available else 0.0
            else:
                places = self._places.get(view.id, 1e9)
                if view.pending and view.reported_at_s != self._seen.get(view.id):
                    self._seen[view.id]=view.reported_at_s
                    self._waited[view.id]=self._waited.get(view.id,0)+1
                    if self._waited[view.id]>self.options.two: places=view.running
                elif not view.pending:
                    self._waited[view.id]=0
                    if view.running>places: places=1e9
                self._places[view.id]=max(1,places)
                wait = self._duration/max(1,places)*max(0, n+1-places)
            misses.append(missed)
            costs.append(
                rw*view.round_trip_ms+pw*wait
                + prefill * missed * (1 + others * n)
                + queue * backlog
                + crowd * n
            )
        place = self.least(costs)
        target = candidates[place]
        hit = request.num_tokens - round(misses[place])
        self._last = (hits.get(target.id, 0), longest)
        reason = (
            RoutingReason.FORWARDED if isinstance(target, PeerView) else RoutingReason.LOWEST_COST
        )
        scores = {view.id: cost for view, cost in zip(candidates, costs, strict=True)}
        return RoutingDecision(target.id, reason, hit, scores)

    def on_sent(self, flight: Flight) -> None:
        import os
        self.mode='first' if self.options.first else 'sent'
        if self.mode=='sent': super().on_sent(flight)
        self._hits[id(flight)] = self._last
        missed = flight.request.num_tokens - flight.decision.hit_tokens
        self._mean_missed += 0.02 * (missed - self._mean_missed)

    def on_first_token(self, flight: Flight) -> None:
        assert flight.first_token_s is not None
        if self.mode!='sent': super().on_sent(flight)
        if flight.decision.reason is RoutingReason.FORWARDED:
            return
        missed = flight.request.num_tokens - flight.decision.hit_tokens
        taken_ms = 1000 * (flight.first_token_s - flight.sent_s) - flight.round_trip_ms
        hit, longest = self._hits.get(id(flight), (0, 0))
        if longest - hit > max(64, missed / 4) and self.options.trims:
            new = flight.request.num_tokens - longest
            rest = taken_ms - self.ttft(flight.backlog_tokens+new)
            share = rest / (self.ttft.slope * (longest - hit) + 1e-9)
            self.fetch_fraction += _LEARNING * (min(1.0, max(0.0, share)) - self.fetch_fraction)

    def on_finished(self, flight: Flight) -> None:
        hit, longest = self._hits.pop(id(flight), (0, 0))
        cached = flight.cached_tokens
        if cached is not None:
            lost=max(0, flight.decision.hit_tokens-cached)/flight.request.num_tokens
            self.thrash+=.02*(lost-self.thrash)
        if cached is not None and longest > hit and cached < (hit + longest) / 2:
            self.fetch_fraction += _LEARNING * (1 - self.fetch_fraction)
        super().on_finished(flight)
        if flight.decision.reason is not RoutingReason.FORWARDED:
            taken_ms = 1000 * (flight.first_token_s - flight.sent_s) - flight.round_trip_ms
            known = flight.decision.hit_tokens if cached is None else min(cached,flight.decision.hit_tokens)
            x = flight.request.num_tokens - known + flight.backlog_tokens
            if taken_ms < 5*self.ttft(x)+200: self.ttft.learn(x, max(0.0, taken_ms))
        out = flight.output_tokens
        self._duration += 0.02*(1000*(flight.ended_s-flight.first_token_s)-self._duration)
        self._mean_output += 0.02 * (out - self._mean_output)
        if out > 1 and flight.first_token_s is not None:
            tpot = 1000 * (flight.ended_s - flight.first_token_s) / (out - 1)
            self._slope.learn(flight.outstanding, tpot, 1.0)

    def on_failed(self, flight: Flight) -> None:
        self._hits.pop(id(flight), None)


class Line:
    """Online least squares y = base + slope x, older samples weighing less and less."""

    def __init__(self, slope: float, memory: float = 0.99) -> None:
        self.slope, self.base = slope, 0.0
        self._memory, self._n = memory, 0.0
        self._x = self._y = self._xx = self._xy = 0.0
        self._prior = slope

    def __call__(self, x):
        return self.base + self.slope*x

    def learn(self, x, y, unit=1000.0):
        m = self._memory
        x/=unit
        self._n = m*self._n + 1
        self._x = m*self._x + x; self._y = m*self._y + y
        self._xx = m*self._xx + x*x; self._xy = m*self._xy + x*y
        mx, my = self._x/self._n, self._y/self._n
        pw = 1.0
        var = self._xx - self._n*mx*mx + pw
        cov = self._xy - self._n*mx*my + pw*self._prior*unit
        sl = max(0.0, cov/var)
        base = my - sl*mx
        if base < 0 and self._xx: base=0.0; sl=self._xy/self._xx
        self.slope=sl/unit; self.base=base
