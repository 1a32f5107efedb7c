"""GORGO v2: round trip, missed prompt tokens and backlog as one cost, its weights tuned online.

The paper (eq. 3) has w_rtt x RTT + uncached + w_queue x queued, a sum of milliseconds and tokens.
Only ratios matter, and physically w_rtt is one over the prefill time of a token, about 10; the
paper's tuning range ends at 2. In the repaired form, everything is in milliseconds, with measured
rates, and the weights are fixed: a search of our own gained nothing over weights of 1 on
the loads of ``bench routers``, and made agents up to 2.5 times as slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from banaserve.base.errors import UserError
from banaserve_route.policies.gorgo.tuner import CodedTuner, numbers
from banaserve_route.policies.interface import (
    FleetView,
    Flight,
    Need,
    PeerView,
    ReplicaView,
    Request,
    RoutingDecision,
    RoutingReason,
    State,
)
from banaserve_route.policies.policy import check_choice, check_range
from banaserve_route.policies.prefixes.tree_policy import TreeOptions, TreePolicy
from banaserve_route.policies.rates import Rates
from banaserve_route.policies.registry import register

FIXED, CODED = "fixed", "as-coded"
_OUTPUT_TOKENS = 128
"""Assumed number of output tokens of an answer of unknown length."""

FIRST_TOKEN, END = "first_token", "end"


@dataclass(frozen=True, slots=True)
class GorgoOptions(TreeOptions):
    """Options of ``gorgo``.

    Attributes:
        tuning: Tuning of the weights: ``fixed`` (none) or ``as-coded``, which starts from its own
            weights.
        w_rtt: Weight of the round trip, if it is fixed.
        w_queue: Weight of the backlog, if it is fixed.
        is_in_ms: True if tokens are converted to time; else they are added to milliseconds as in
            the paper.
        prefill_ms_per_token: Prefill time of a token, assumed until it is measured.
        queue_ms_per_token: Time of a token of the backlog, assumed until it is measured.
        measures_rates: True to learn both times from times to first token.
        released_at: End of a request's backlog: ``first_token`` counts uncached tokens until then,
            ``end`` all prompt tokens.
        batch_ms: Time that each outstanding request adds to an output token; 0 as published.
            Without it, only the time to first token counts against a crowded replica.
        noise_ms: Difference up to which costs are equal, in milliseconds; one of equals is drawn,
            since an exact minimum would send bursts to one replica.
    """

    tuning: str = FIXED
    w_rtt: float = 1.0
    w_queue: float = 1.0
    is_in_ms: bool = True
    prefill_ms_per_token: float = 0.094
    queue_ms_per_token: float = 0.02
    measures_rates: bool = True
    released_at: str = FIRST_TOKEN
    batch_ms: float = 0.2
    noise_ms: float = 2.0

    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        check_choice("tuning", self.tuning, (FIXED, CODED))
        check_choice("released_at", self.released_at, (FIRST_TOKEN, END))
        check_range(
            self,
            {
                "w_rtt": (0, 1e6),
                "w_queue": (0, 1e6),
                "prefill_ms_per_token": (1e-6, 1e6),
                "queue_ms_per_token": (1e-6, 1e6),
                "batch_ms": (0, 1e6),
                "noise_ms": (0, 1e6),
            },
        )


_PRINTED: Mapping[str, Any] = {
    "is_in_ms": False,
    "measures_rates": False,
    "released_at": END,
    "batch_ms": 0.0,
    "noise_ms": 0.0,
    "trims": False,
}


@register("gorgo")
class Gorgo(TreePolicy):
    """Policy of one balancer for all regions; every replica and peer is a candidate."""

    PRESETS: ClassVar[Mapping[str, Any]] = {
        "repaired": GorgoOptions(),
        "published": GorgoOptions(tuning=FIXED, w_rtt=0.276, w_queue=0.5, **_PRINTED),
        "as-coded": GorgoOptions(tuning=CODED, **_PRINTED),
    }
    needs: frozenset[Need] = frozenset({Need.REQUEST, Need.REPORTS, Need.CACHES, Need.PEERS})

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        options = self.options
        self.rates = Rates(options.prefill_ms_per_token, options.queue_ms_per_token)
        self.tuner = CodedTuner(self.generator) if options.tuning == CODED else None
        self._is_held = False

    @property
    def weights(self) -> tuple[float, ...]:
        """Weights of round trip and backlog in use."""
        if self.tuner is None:
            return (self.options.w_rtt, self.options.w_queue)
        return self.tuner.weights

    def pick(
        self, request: Request, candidates: Sequence[ReplicaView], fleet: FleetView
    ) -> RoutingDecision:
        hits = self.hits(request)
        w_rtt, w_queue = self.weights
        is_in_ms = self.options.is_in_ms
        prefill = self.rates.prefill_ms if is_in_ms else 1.0
        queue = w_queue * (self.rates.queue_ms if is_in_ms else 1.0)
        until_end = self.options.released_at == END
        tokens = request.num_tokens
        crowd = w_queue * self.options.batch_ms * (request.expected_output_tokens or _OUTPUT_TOKENS)
        costs = [
            w_rtt * view.round_trip_ms
            + prefill * (tokens - hits.get(view.id, 0))
            + queue * (view.outstanding_tokens if until_end else view.uncached_tokens)
            + crowd * view.outstanding
            for view in candidates
        ]
        place = self.least(costs, self.options.noise_ms)
        target = candidates[place]
        scores = {}
        if is_in_ms:
            scores = {view.id: cost for view, cost in zip(candidates, costs, strict=True)}
        reason = (
            RoutingReason.FORWARDED if isinstance(target, PeerView) else RoutingReason.LOWEST_COST
        )
        return RoutingDecision(target.id, reason, hits.get(target.id, 0), scores)

    def on_first_token(self, flight: Flight) -> None:
        assert flight.first_token_s is not None
        if self.options.measures_rates:
            missed = flight.request.num_tokens - flight.decision.hit_tokens
            taken_ms = 1000 * (flight.first_token_s - flight.sent_s) - flight.round_trip_ms
            self.rates.learn(missed, flight.backlog_tokens, max(0.0, taken_ms))

    def on_finished(self, flight: Flight) -> None:
        super().on_finished(flight)
        if self.tuner is not None and not self._is_held:
            assert flight.first_token_s is not None
            self.tuner.sample(1000 * (flight.first_token_s - flight.sent_s))

    def hold_safe(self, is_held: bool) -> None:
        if self.tuner is not None and is_held and not self._is_held:
            self.tuner.start_anew()
        self._is_held = is_held

    def state(self) -> State:
        state = self.tuner.state() if self.tuner is not None else {}
        if self.options.measures_rates:
            state["rates"] = self.rates.state()
        return state

    def restore(self, state: State) -> None:
        if not isinstance(state, dict) or not state.keys() <= self.state().keys():
            raise UserError("the saved state is not one of this policy: remove it")
        saved = numbers(state, "rates", 13) if self.options.measures_rates else []
        if self.tuner is not None:
            self.tuner.restore(state)
        if saved:
            self.rates.restore(saved)
