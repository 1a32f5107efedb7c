"""Preble (ICLR'25): exploit a long cached prefix, else explore by three costs (E2, Alg. 1 and 2).

Repairs: a match is judged for each replica by the present content of its cache; a replica's load is
its unfinished work, not all work sent in three minutes; requests on a prefix are divided by those
on the same replica; moving a prefix must pay for its recomputation.

ImbalR has no value in the paper. ``published`` has that of the authors' code, which does not use
it, and takes the share of cached prompt tokens for DecodeRatio, as both do. The repaired form
leaves out ImbalR and the scaling of hot prefixes, which gain nothing beside its loads.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from banaserve_route.policies.interface import (
    FleetView,
    Flight,
    ReplicaId,
    ReplicaView,
    Request,
    RoutingDecision,
    RoutingReason,
)
from banaserve_route.policies.policy import Policy, check_choice, check_range
from banaserve_route.policies.preble.costs import REGRESSIONS, WindowLoad, WindowSum
from banaserve_route.policies.preble.tree import CacheTree, Node, key_node
from banaserve_route.policies.rates import Rates
from banaserve_route.policies.registry import register

MEASURED = "measured"
_LEARNING = 0.02
RECENT_S = 30.0
"""Window over which cached and computed prompt tokens are compared, in seconds."""


@dataclass(frozen=True, slots=True)
class PrebleOptions:
    """Options of ``preble``.

    Attributes:
        window_s: Window H, in seconds.
        balance_threshold: Ratio of the heaviest load to the lightest, Th_bal, above which requests
            that would exploit the heaviest replica go to the lightest; 0: never.
        balance_after: Number of requests per replica before the first one is redirected.
        scales_hot_prefixes: True if a key node whose queueing time doubled within H gets another
            replica, with half of its subtree.
        decode_fraction: Share of cached tokens in a replica's prompts, ImbalR, above which an
            explored request goes to that replica; 1: never.
        counts_outstanding: True if L is the work of outstanding requests, False if of all requests
            sent within H.
        regression: Source of prefill times: ``measured`` here, or Preble's code for Mistral-7B on
            an A6000, ``as-coded`` or made ``monotone``.
        prefill_ms_per_token: Prefill time of a token, assumed until measured.
        output_ms_per_token: Time of a decode step, assumed until measured.
        output_tokens: Number of output tokens of an answer, assumed until measured.
        decode_share: Share of its decode steps' time that a request costs the others in its batch.
            At 1, as published, a replica with a full batch looks busy for minutes, and prefixes
            move that had better stay.
        capacity_tokens: KV capacity of a replica, in tokens.
    """

    window_s: float = 180.0
    balance_threshold: float = 1.5
    balance_after: int = 50
    scales_hot_prefixes: bool = False
    decode_fraction: float = 1.0
    counts_outstanding: bool = True
    regression: str = MEASURED
    prefill_ms_per_token: float = 0.094
    output_ms_per_token: float = 15.0
    output_tokens: float = 45.0
    decode_share: float = 0.1
    capacity_tokens: int = 198_516

    def __post_init__(self) -> None:
        check_choice("regression", self.regression, (MEASURED, *REGRESSIONS))
        check_range(
            self,
            {
                "window_s": (1, 1e6),
                "balance_threshold": (0, 1e6),
                "balance_after": (0, 1e9),
                "decode_fraction": (0, 1),
                "prefill_ms_per_token": (1e-6, 1e6),
                "output_ms_per_token": (0, 1e6),
                "output_tokens": (0, 1e6),
                "decode_share": (0, 1),
                "capacity_tokens": (1, 1e10),
            },
        )


_SENT: Mapping[str, Any] = {
    "counts_outstanding": False,
    "scales_hot_prefixes": True,
    "output_ms_per_token": 150.0,
    "decode_share": 1.0,
}


@register("preble")
class Preble(Policy):
    """E2 policy with rebalancing, autoscaling of hot prefixes and balance of prefill and decode."""

    PRESETS: ClassVar[Mapping[str, Any]] = {
        "repaired": PrebleOptions(),
        "published": PrebleOptions(regression="monotone", decode_fraction=0.7, **_SENT),
        "as-coded": PrebleOptions(regression="as-coded", **_SENT),
    }

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        options = self.options
        self.tree = CacheTree(self.unit_bytes, options.capacity_tokens, options.window_s)
        self.rates = Rates(options.prefill_ms_per_token, 0.02)
        self._step_ms = options.output_ms_per_token
        self._loads: dict[ReplicaId, WindowLoad] = {}
        self._work_ms: dict[int, float] = {}
        self._num_sent = 0
        self._split: tuple[Node, ReplicaId] | None = None

    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> RoutingDecision:
        now_s, self._split = fleet.now_s, None
        matched = self.tree.match(request.prompt, self._tokens_per_unit(request))
        hits = {target: min(request.num_tokens, int(hit[0])) for target, hit in matched.items()}
        loads = [self._load_ms(view.id, now_s) for view in candidates]
        costs = [
            load
            + self._eviction_ms(view.id, request, hits, now_s)
            + self._missed_ms(view.id, request, hits)
            for view, load in zip(candidates, loads, strict=True)
        ]
        longest = max((hits.get(view.id, 0) for view in candidates), default=0)
        if longest > request.num_tokens - longest:
            place, reason = self._exploit(candidates, hits, matched, loads, costs, now_s)
        else:
            place, reason = self._explore(candidates, costs, now_s)
        target = candidates[place].id
        scores = {view.id: cost for view, cost in zip(candidates, costs, strict=True)}
        return RoutingDecision(target, reason, hits.get(target, 0), scores)

    def _exploit(
        self,
        candidates: Sequence[ReplicaView],
        hits: Mapping[ReplicaId, int],
        matched: Mapping[ReplicaId, tuple[float, Node]],
        loads: Sequence[float],
        costs: Sequence[float],
        now_s: float,
    ) -> tuple[int, RoutingReason]:
        """Return the cheapest replica with the longest match, or another one to spread the load."""
        longest = max(hits.get(view.id, 0) for view in candidates)
        places = [at for at, view in enumerate(candidates) if hits.get(view.id, 0) == longest]
        place = places[self.least([costs[at] for at in places])]
        others = [at for at in range(len(candidates)) if at not in places]
        is_due = self._num_sent >= self.options.balance_after * len(candidates)
        if not others or not is_due:
            return place, RoutingReason.PREFIX
        lightest = others[self.least([loads[at] for at in others])]
        is_extreme = loads[place] >= max(loads) and loads[lightest] <= min(loads)
        pays = costs[lightest] < costs[place] or not self.options.counts_outstanding
        threshold = self.options.balance_threshold
        if threshold and is_extreme and loads[place] > threshold * loads[lightest] and pays:
            return lightest, RoutingReason.REBALANCED
        source = candidates[place].id
        node = key_node(matched[source][1])
        if self.options.scales_hot_prefixes and self._has_doubled(node, now_s):
            self._split = node, source
            return lightest, RoutingReason.REBALANCED
        return place, RoutingReason.PREFIX

    def _explore(
        self,
        candidates: Sequence[ReplicaView],
        costs: Sequence[float],
        now_s: float,
    ) -> tuple[int, RoutingReason]:
        limit = self.options.decode_fraction
        if limit < 1:
            known = [self._loads.get(view.id) for view in candidates]
            shares = [load.decode_fraction(now_s) if load else 0.0 for load in known]
            place = max(range(len(shares)), key=shares.__getitem__)
            if shares[place] > limit:
                return place, RoutingReason.IMBALANCE
        return self.least(costs), RoutingReason.EXPLORE

    def on_sent(self, flight: Flight) -> None:
        request, target = flight.request, flight.target
        load = self._loads.setdefault(target, WindowLoad(self.options.window_s, RECENT_S))
        if self._split is not None and flight.decision.reason is RoutingReason.REBALANCED:
            node, source = self._split
            self.tree.split(node, source, flight.sent_s)
            node.waits_ms, node.num_waits = (WindowSum(self.options.window_s) for _ in range(2))
        self._split = None
        context = flight.decision.hit_tokens
        prefill_ms = self._prefill_ms(request.num_tokens - context, context)
        decode_ms = self.options.decode_share * self._step_ms * self._output_tokens(load)
        load.add(flight.sent_s, prefill_ms + decode_ms, request.num_tokens, context)
        self._num_sent += 1
        self._work_ms[id(flight)] = prefill_ms + decode_ms
        self.tree.add(request.prompt, self._tokens_per_unit(request), target, flight.sent_s)

    def on_first_token(self, flight: Flight) -> None:
        assert flight.first_token_s is not None
        request, hit_tokens = flight.request, flight.decision.hit_tokens
        missed = request.num_tokens - hit_tokens
        taken_ms = 1000 * (flight.first_token_s - flight.sent_s) - flight.round_trip_ms
        if self.options.regression == MEASURED:
            self.rates.learn(missed, flight.backlog_tokens, max(0.0, taken_ms))
        matched = self.tree.match(request.prompt, self._tokens_per_unit(request))
        if flight.target in matched:
            node = key_node(matched[flight.target][1])
            waited_ms = max(1.0, taken_ms - self._prefill_ms(missed, hit_tokens))
            node.waits_ms.add(waited_ms, flight.first_token_s)
            node.num_waits.add(1, flight.first_token_s)

    def on_finished(self, flight: Flight) -> None:
        self._ended(flight)
        load = self._loads.get(flight.target)
        if load is None:
            return
        known = self._output_tokens(load)
        load.output_tokens = known + _LEARNING * (flight.output_tokens - known)
        assert flight.first_token_s is not None
        assert flight.ended_s is not None
        if flight.output_tokens > 1:
            taken_ms = 1000 * (flight.ended_s - flight.first_token_s)
            step_ms = taken_ms / (flight.output_tokens - 1)
            self._step_ms += _LEARNING * (step_ms - self._step_ms)
        cached, request = flight.cached_tokens, flight.request
        if cached is not None and cached < flight.decision.hit_tokens:
            per_unit = self._tokens_per_unit(request)
            self.tree.trim(request.prompt, per_unit, flight.target, cached)
            self.tree.add(request.prompt, per_unit, flight.target, flight.ended_s)

    def on_failed(self, flight: Flight) -> None:
        self._ended(flight)

    def on_replica_gone(self, target: ReplicaId) -> None:
        self.tree.forget(target)
        self._loads.pop(target, None)

    def tick(self, now_s: float) -> None:
        for load in self._loads.values():
            load.forget(now_s)

    def _ended(self, flight: Flight) -> None:
        work_ms = self._work_ms.pop(id(flight), 0.0)
        load = self._loads.get(flight.target)
        if load is not None:
            load.outstanding_ms = max(0.0, load.outstanding_ms - work_ms)

    def _load_ms(self, target: ReplicaId, now_s: float) -> float:
        """Return the load L of Alg. 2, in milliseconds."""
        load = self._loads.get(target)
        if load is None:
            return 0.0
        if self.options.counts_outstanding:
            return load.outstanding_ms
        return load.history_ms(now_s)

    def _eviction_ms(
        self, target: ReplicaId, request: Request, hits: Mapping[ReplicaId, int], now_s: float
    ) -> float:
        """Return M of Alg. 2: time to recompute evicted prefixes, weighted by share of requests."""
        load = self._loads.get(target)
        if load is None:
            return 0.0
        missed = request.num_tokens - hits.get(target, 0)
        num_sent = max(1, load.num_sent(now_s))
        total = 0.0
        for node in self.tree.would_evict(target, missed):
            share = min(1.0, node.hits[target].total(now_s) / num_sent)
            total += self._prefill_ms(node.tokens, node.start) * share
        return total

    def _missed_ms(
        self, target: ReplicaId, request: Request, hits: Mapping[ReplicaId, int]
    ) -> float:
        """Return P of Alg. 2: time to compute the missed tokens, in milliseconds."""
        context = hits.get(target, 0)
        return self._prefill_ms(request.num_tokens - context, context)

    def _prefill_ms(self, tokens: float, context: float) -> float:
        if self.options.regression == MEASURED:
            return self.rates.prefill_ms * tokens
        return REGRESSIONS[self.options.regression](tokens, context)

    def _has_doubled(self, node: Node, now_s: float) -> bool:
        """Return whether requests for ``node`` wait twice as long as in the previous half of H."""
        for sums in (node.waits_ms, node.num_waits):
            sums.roll(now_s)
        if node.num_waits.recent < 5 or node.num_waits.before < 5:
            return False
        recent = node.waits_ms.recent / node.num_waits.recent
        return recent >= 2 * node.waits_ms.before / node.num_waits.before

    def _output_tokens(self, load: WindowLoad) -> float:
        return load.output_tokens or self.options.output_tokens

    def _tokens_per_unit(self, request: Request) -> float:
        return request.num_tokens / max(1, len(request.prompt) // self.unit_bytes)
