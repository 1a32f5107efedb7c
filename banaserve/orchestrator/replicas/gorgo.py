"""GORGO v2: round trip, missed prompt tokens and backlog as one cost, its weights tuned online.

Printed (eq. 3): w_rtt x RTT + uncached + w_queue x queued, milliseconds and tokens added up. Only
ratios matter, and physically w_rtt is one over the prefill time of a token, about 10; the range
that the paper tunes in ends at 2. Repaired, everything is in milliseconds, with measured rates,
and the weights are multipliers around 1 within bounds that contain the physical values.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar

from banaserve.errors import UserError
from banaserve.names import check_known
from banaserve.orchestrator.replicas.interface import (
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
from banaserve.orchestrator.replicas.papers.tuner_coded import CodedTuner
from banaserve.orchestrator.replicas.policy import check_choice, check_range
from banaserve.orchestrator.replicas.prefixes.tree_policy import TreeOptions, TreePolicy
from banaserve.orchestrator.replicas.rates import Rates
from banaserve.orchestrator.replicas.registry import register
from banaserve.orchestrator.replicas.tuner import Tuner, TunerOptions, numbers

FIXED, REPAIRED, CODED = "fixed", "repaired", "as-coded"
_OUTPUT_TOKENS = 128
"""Of an answer of which nothing is said."""

FIRST_TOKEN, END = "first_token", "end"


@dataclass(frozen=True, slots=True)
class GorgoOptions(TreeOptions):
    """Options of ``gorgo``.

    Attributes:
        tuning: ``fixed`` weights, tuned as ``repaired`` or as ``as-coded``.
        w_rtt: Of the round trip; where to start and what to return to.
        w_queue: Of the backlog, likewise.
        is_in_ms: Tokens are turned into time; else they are added to milliseconds as printed.
        prefill_ms_per_token: Assumed until it is measured; likewise
        queue_ms_per_token: of a token of the backlog.
        measures_rates: Learn both from times to first token.
        released_at: What the backlog is: uncached tokens until the ``first_token``, or all prompt
            tokens until the ``end``.
        batch_ms: What each outstanding request adds to the time of an output token; 0 as published.
            Without it nothing but the first token counts against a crowded replica.
        noise_ms: Costs that differ by less are equal, and equals are drawn: an exact minimum
            sends bursts to one replica.
        tuner: Of the repaired tuning.
    """

    tuning: str = REPAIRED
    w_rtt: float = 1.0
    w_queue: float = 1.0
    is_in_ms: bool = True
    prefill_ms_per_token: float = 0.094
    queue_ms_per_token: float = 0.02
    measures_rates: bool = True
    released_at: str = FIRST_TOKEN
    batch_ms: float = 0.2
    noise_ms: float = 2.0
    tuner: TunerOptions = field(default_factory=TunerOptions)

    def __post_init__(self) -> None:
        TreeOptions.__post_init__(self)
        check_choice("tuning", self.tuning, (FIXED, REPAIRED, CODED))
        check_choice("released_at", self.released_at, (FIRST_TOKEN, END))
        if isinstance(self.tuner, dict):
            for name in self.tuner:
                check_known("option of the tuner", name, [one.name for one in fields(TunerOptions)])
            object.__setattr__(self, "tuner", TunerOptions(**self.tuner))
        bounds = (self.tuner.low, self.tuner.high) if self.tuning == REPAIRED else (0, 1e6)
        check_range(
            self,
            {
                "w_rtt": bounds,
                "w_queue": bounds,
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
    """One balancer for all regions; every replica and peer competes."""

    PRESETS: ClassVar[Mapping[str, Any]] = {
        "repaired": GorgoOptions(),
        "untuned": GorgoOptions(tuning=FIXED),
        "published": GorgoOptions(tuning=FIXED, w_rtt=0.276, w_queue=0.5, **_PRINTED),
        "as-coded": GorgoOptions(tuning=CODED, **_PRINTED),
    }
    needs: frozenset[Need] = frozenset({Need.REQUEST, Need.REPORTS, Need.PEERS})

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        options = self.options
        self.rates = Rates(options.prefill_ms_per_token, options.queue_ms_per_token)
        self.tuner: Tuner | CodedTuner | None = None
        if options.tuning == REPAIRED:
            self.tuner = Tuner((options.w_rtt, options.w_queue), options.tuner, self.generator)
        elif options.tuning == CODED:
            self.tuner = CodedTuner(self.generator)
        self._phases: dict[int, int] = {}
        self._is_held = False

    @property
    def weights(self) -> tuple[float, ...]:
        """Of round trip and backlog, as in use."""
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

    def on_sent(self, flight: Flight) -> None:
        super().on_sent(flight)
        if self.tuner is not None and not self._is_held:
            self._phases[id(flight)] = self.tuner.phase

    def on_first_token(self, flight: Flight) -> None:
        assert flight.first_token_s is not None
        if self.options.measures_rates:
            missed = flight.request.num_tokens - flight.decision.hit_tokens
            taken_ms = 1000 * (flight.first_token_s - flight.sent_s) - flight.round_trip_ms
            self.rates.learn(missed, flight.backlog_tokens, max(0.0, taken_ms))

    def on_finished(self, flight: Flight) -> None:
        super().on_finished(flight)
        phase = self._phases.pop(id(flight), None)
        if self.tuner is not None and phase is not None:
            assert flight.first_token_s is not None
            assert flight.ended_s is not None
            ttft_ms = 1000 * (flight.first_token_s - flight.sent_s)
            self.tuner.sample(phase, ttft_ms, 1000 * (flight.ended_s - flight.sent_s))

    def on_failed(self, flight: Flight) -> None:
        phase = self._phases.pop(id(flight), None)
        if self.tuner is not None and phase is not None and flight.is_fault:
            self.tuner.failed(phase)

    def hold_safe(self, is_held: bool) -> None:
        if self.tuner is not None and is_held and not self._is_held:
            self.tuner.return_to_safe()
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
