"""State of a request across its legs: the request itself, its progress, and values for later legs.

A request progresses by the end of its prefill leg and by each output token.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from banaserve.engine.vllm.compat import engine as compat
from banaserve.engine.vllm.compat.requests import RequestOutput, RequestOutputKind
from banaserve.engine.vllm.instance import Instance
from banaserve.engine.vllm.monitoring import metrics
from banaserve.engine.vllm.monitoring.leg_stats import Leg, LegRequestStats, Sequences
from banaserve.engine.vllm.requests.retry_turns import RetryTurn
from banaserve.engine.vllm.tracing.request_log import RequestNotes
from banaserve.types import NO_LIMITS, NOWHERE, InstanceId, RequestLimits, Route

MAX_DEATHS = 3
"""Number of instance deaths after which a request that ran alone is given up.

A request that ran beside others is given up one death later. Instances are given up only after more
deaths than that.
"""
_SUSPECT_DEATHS = 2
"""Number of instance deaths without progress after which a request waits for a turn to retry."""


class Prediction(NamedTuple):
    """Times that the routing policy predicted for a request.

    Attributes:
        route: Route with the predicted times.
        routed_s: Time of the routing on the event loop's clock, in seconds.
    """

    route: Route
    routed_s: float

    @classmethod
    def of(cls, route: Route) -> Prediction | None:
        """Return the prediction of a route made just now; None if the policy predicts nothing."""
        if route.ttft_s is None:
            return None
        return cls(route, asyncio.get_running_loop().time())

    def observe_ttft(self, now_s: float) -> None:
        """Compare predicted and measured time to the first output, which arrived at ``now_s``."""
        self._observe("ttft", self.route.ttft_s, now_s - self.routed_s)

    def observe_tpot(self, measured_s: float) -> None:
        """Compare predicted and measured average time per output token after the first."""
        self._observe("tpot", self.route.tpot_s, measured_s)

    def _observe(self, what: str, predicted_s: float | None, measured_s: float) -> None:
        if predicted_s is not None and measured_s > 0:
            legs = "one_leg" if self.route.prefill is None else "two_legs"
            metrics.PREDICTED.labels(what, legs).observe(predicted_s / measured_s)


@dataclass
class RequestContext:
    """Sequence of a request as the front door received it, and the sequence's progress.

    Attributes:
        request: Request of one sequence: tokenised, validated, with its id.
        prompt_text: Text of the prompt; None if unknown.
        first_token_blocker: Reason why decode must sample the first token; None for none.
        uncached_tokens: Router's estimate of the number of tokens that prefill has to compute.
        is_stored: True if it has no prefill leg because the store has its prompt.
        deadline: Deadline on the event loop's clock, in seconds.
        state: vLLM's front-end state (detokenizer, logprobs); None before output has begun.
        split_blocker: Reason why the request cannot be split into legs; None if it can.
        prefilled: True if the prompt's KV has been left in the store.
        is_prompt_counted: True if vLLM's metrics already count its prompt, from an earlier leg.
        sequences: Counts of all sequences of the same request.
        num_cached_tokens: Number of prompt tokens that the prefill leg did not compute.
        num_created_tokens: Number of prompt tokens that the prefill leg has left in caches.
        first: Output of the prefill leg, with the first token and the reason why it stopped there;
            None if decode samples the first token.
        num_sent: Number of outputs sent to the client.
        aborted: True if the request was aborted by its id; it ends with the output so far.
        num_deaths: Number of instances that died under it since its last progress.
        num_beside: Number of requests in flight on its instance, itself included.
        notes: Events of the request, for ``banaserve trace``.
        limits: Latency limits that the request specifies.
        resident_tokens: Number of prompt tokens that are probably in an engine's own cache, by
            instance.
        prediction: Times predicted by the routing policy; None if none or a leg ran again.
        prompt_leg_ended: Event set once the prompt is in the store, or the whole request is on its
            way to one instance; then other sequences of the same prompt may begin.
        is_sibling: True if another sequence counts as the request, in metrics and notes.
        has_siblings: True if it counts as the request and has siblings, which do not.
        retry_turn: Turn of a retry after instances died under the request; None if none is pending.
        weights: Identity of the weights of the engines that compute it; empty before the first.
        hold: Number under which the store holds its prompt's blocks for decode; 0 for none.
        reader: Index among the sequences that read these blocks.
        computed_by: Instance that left its prompt in the store; None before that.
        hold_stores: Stores that hold its prompt's blocks; see ``PrefixLookups.end_hold``.
        rebalanced_s: Time of its last move by the rebalancer, on the event loop's clock, in
            seconds; None if it was not moved.
    """

    request: compat.EngineCoreRequest
    prompt_text: str | None
    first_token_blocker: str | None
    deadline: float
    notes: RequestNotes
    limits: RequestLimits = NO_LIMITS
    resident_tokens: Mapping[InstanceId, int] = field(default_factory=lambda: NOWHERE)
    uncached_tokens: int = 0
    is_stored: bool = False
    split_blocker: str | None = None
    state: Any = None
    prefilled: bool = False
    is_prompt_counted: bool = False
    sequences: Sequences = field(default_factory=Sequences)
    num_cached_tokens: int = 0
    num_created_tokens: int = 0
    first: RequestOutput | None = None
    num_sent: int = 0
    aborted: bool = False
    num_deaths: int = 0
    num_beside: int = 1
    prediction: Prediction | None = None
    prompt_leg_ended: asyncio.Event = field(default_factory=asyncio.Event)
    is_sibling: bool = False
    has_siblings: bool = False
    retry_turn: RetryTurn | None = None
    weights: str = ""
    rebalanced_s: float | None = None
    hold: int = 0
    reader: int = 0
    computed_by: Instance | None = None
    hold_stores: tuple[str, ...] = ()
    _first_s: float = 0.0
    _furthest: int = 0
    _blame: float = 0.0
    _num_ids: int = 0

    def died(self) -> None:
        """Record that an instance died under the request, which may be the cause.

        All requests on the instance share the blame equally. A request in its retry turn gets at
        least half of it: the others had made progress since the last death, or had just begun.
        Progress since the last death clears earlier deaths and blame.
        """
        if self._come > self._furthest:
            self.num_deaths, self._blame, self._furthest = 0, 0.0, self._come
        self.num_deaths += 1
        is_tried = self.retry_turn is not None and self.retry_turn.is_on
        self._blame += 1.0 / min(self.num_beside, 2 if is_tried else self.num_beside)

    def take_other_id(self) -> None:
        """Continue under a new id, since the previous engine may be in the middle of a step.

        Outputs of that step carry the old id and are dropped, even if the request returns to the
        same engine.
        """
        stem = self.request.request_id.removesuffix(f"-m{self._num_ids}")
        self._num_ids += 1
        self.request.request_id = f"{stem}-m{self._num_ids}"

    def comes(self) -> None:
        """End the retry turn if the request has progressed since an instance last died under it."""
        if self.retry_turn is not None and self._come > self._furthest:
            self.retry_turn.end()

    @property
    def num_readers(self) -> int:
        """Number of sequences that will read the prompt's KV left by the prefill leg."""
        is_for_all = self.has_siblings and not self.prompt_leg_ended.is_set()
        return self.sequences.num_sequences if is_for_all else 1

    @property
    def _come(self) -> int:
        return len(self.tokens_so_far) + self.prefilled

    @property
    def is_suspect(self) -> bool:
        """True if instances died under the request and it has made no progress since."""
        return self.num_deaths >= _SUSPECT_DEATHS and self._come <= self._furthest

    def start_over(self) -> bool:
        """Discard all that was computed so far; return False, and keep it, if the answer has begun.

        Called when the request's weights are gone: other weights compute other KV and tokens.
        """
        others_have_begun = self.has_siblings and self.prompt_leg_ended.is_set()
        if self.num_sent or self.is_sibling or others_have_begun:
            return False
        self.is_prompt_counted |= bool(self.tokens_so_far)
        self.prefilled, self.first, self.state, self.weights = False, None, None, ""
        self.uncached_tokens = len(self.request.prompt_token_ids or ())
        return True

    @property
    def is_given_up(self) -> bool:
        """True if the request is probably what instances die of, so that it is not retried."""
        return self.num_deaths >= MAX_DEATHS and self._blame >= 1.0

    def to_compute_at(self, instance_id: InstanceId) -> int:
        """Return the number of prompt tokens to compute at the instance, as the router knows."""
        num_tokens = len(self.request.prompt_token_ids or ())
        return min(self.uncached_tokens, num_tokens - self.resident_tokens.get(instance_id, 0))

    def stats(self, is_prefill: bool = False) -> LegRequestStats:
        """Return vLLM's statistics for the request's next leg."""
        if is_prefill:
            leg = Leg.UNCOUNTED if self.is_prompt_counted else Leg.PREFILL
        else:
            leg = Leg.DECODE if self.is_prompt_counted else Leg.WHOLE
        return LegRequestStats(
            arrival_time=self.request.arrival_time, leg=leg, sequences=self.sequences
        )

    @property
    def tokens_so_far(self) -> list[int]:
        return compat.output_tokens(self.state) if self.state is not None else []

    @property
    def num_output_tokens(self) -> int:
        """Number of output tokens so far."""
        return len(self.tokens_so_far)

    def first_token_is_there(self) -> None:
        """Note the time of the first token, whether or not it goes to the client at once."""
        if self.prefilled:  # report prefill's count: for the decode leg, all tokens are cached
            compat.set_created_tokens(self.state, self.num_created_tokens)
        if not self.is_sibling:
            source = "decode" if self.first is None else "prefill"
            self.notes.first_token(source, self.first_token_blocker if self.prefilled else None)

    def send(self, output: RequestOutput) -> RequestOutput:
        """Note that ``output`` goes to the client; return it."""
        self.num_sent += 1
        self._compare(output)
        # The store is not asked while all instances do both.
        if self.num_sent == 1 and not self.is_sibling and not self.notes.cached_tokens:
            self.notes.cached_tokens = output.num_cached_tokens or 0
        if output.finished:
            self.notes.finish_reason = output.outputs[0].finish_reason
        return output

    def _compare(self, output: RequestOutput) -> None:
        """Compare predicted with measured times, if the request ran as first routed.

        An answer that is not streamed does not show the times of its tokens.
        """
        prediction, params = self.prediction, self.request.sampling_params
        is_streamed = params is not None and params.output_kind is not RequestOutputKind.FINAL_ONLY
        if prediction is None or not is_streamed:
            return
        now_s = asyncio.get_running_loop().time()
        if self.num_sent == 1:
            self._first_s = now_s
            prediction.observe_ttft(now_s)
        if output.finished and (more := self.num_output_tokens - 1) > 0:
            prediction.observe_tpot((now_s - self._first_s) / more)
