"""State of one sequence of a request on its way through the instances."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from banaserve.base.types import NO_LIMITS, InstanceId, RequestLimits, Route
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.requests import RequestOutput, RequestOutputKind, SamplingParams
from banaserve.serving.instances.instance import Instance
from banaserve.serving.monitoring import metrics
from banaserve.serving.monitoring.leg_stats import Leg, LegRequestStats, Sequences
from banaserve.serving.requests.intake import Blockers, num_prompt_tokens
from banaserve.serving.requests.prefix_lookup import PromptHold
from banaserve.serving.requests.suspects import Suspicion
from banaserve.serving.tracing.request_log import RequestNotes


@dataclass
class StoredPrompt:
    """Prompt whose KV a prefill leg leaves in the store.

    Attributes:
        computed_by: Instance of the prefill leg.
        hold: Hold of the prompt's blocks in the stores of both legs.
        output: Output of the prefill leg, with one token; None until the leg has ended.
    """

    computed_by: Instance
    hold: PromptHold
    output: RequestOutput | None = None


class Prediction(NamedTuple):
    """Times that the routing policy predicted for a request.

    Attributes:
        routed_s: Time of the routing on the event loop's clock, in seconds.
    """

    route: Route
    routed_s: float


@dataclass
class RequestContext:
    """One sequence of a request as the front door received it, and the sequence's progress.

    Attributes:
        request: Request of one sequence: tokenised, validated, with its id.
        deadline: Deadline on the event loop's clock, in seconds.
        uncached_tokens: Estimated number of prompt tokens that the store does not have.
        keep_s: Time for which the store is asked to keep its blocks, in seconds; 0 for none.
        index: Index of the sequence; sequence 0 counts as the request, in metrics and notes.
        prompt_leg_ended: Event of all sequences, set once the prompt is in the store, or the first
            sequence is on its way to one instance; then the other sequences begin.
        prompt: Prompt in the store, held for decode; None before a prefill leg.
        state: vLLM's front-end state (detokenizer, logprobs); None before output has begun.
        weights: Identity of the weights of the engines that compute it; empty before the first.
        is_prompt_counted: True if vLLM's metrics already count its prompt, from an earlier leg.
        prediction: Times predicted by the routing policy; None if none or a leg ran again.
        first_sent_s: Time of the first output to the client, on the event loop's clock, in seconds;
            None before that.
        aborted: True if the request was aborted by its id; it ends with the output so far.
        is_first_try: True if no earlier attempt to run the request has failed.
        dead: Instance that died last under the request; None for none, or if it has been removed.
        avoided: Instance that the rebalancer has just moved the request away from; None for none.
        moved_s: Time of that move on the event loop's clock, in seconds; None for none.
    """

    request: compat.EngineCoreRequest
    prompt_text: str | None
    blockers: Blockers
    deadline: float
    notes: RequestNotes
    limits: RequestLimits = NO_LIMITS
    uncached_tokens: int = 0
    keep_s: float = 0.0
    index: int = 0
    sequences: Sequences = field(default_factory=Sequences)
    prompt_leg_ended: asyncio.Event = field(default_factory=asyncio.Event)
    suspicion: Suspicion = field(default_factory=Suspicion)
    prompt: StoredPrompt | None = None
    state: Any = None
    weights: str = ""
    is_prompt_counted: bool = False
    prediction: Prediction | None = None
    first_sent_s: float | None = None
    aborted: bool = False
    is_first_try: bool = True
    dead: Instance | None = None
    avoided: InstanceId | None = None
    moved_s: float | None = None
    _num_ids: int = 0

    @property
    def params(self) -> SamplingParams:
        params = self.request.sampling_params
        assert params is not None
        return params

    @property
    def num_prompt_tokens(self) -> int:
        return num_prompt_tokens(self.request)

    @property
    def prefilled(self) -> RequestOutput | None:
        """Output of the prefill leg; None unless the prompt's KV is in the store."""
        return self.prompt.output if self.prompt is not None else None

    @property
    def first(self) -> RequestOutput | None:
        """Output of the prefill leg, if its token is the answer's first one; None if not."""
        return self.prefilled if self.index == 0 and self.blockers.first_token is None else None

    @property
    def hold(self) -> PromptHold | None:
        return self.prompt.hold if self.prompt is not None else None

    @property
    def tokens_so_far(self) -> list[int]:
        return compat.output_tokens(self.state) if self.state is not None else []

    @property
    def num_output_tokens(self) -> int:
        return len(self.tokens_so_far)

    @property
    def progress(self) -> int:
        """Number that grows with the end of the prefill leg and with each output token."""
        return self.num_output_tokens + (self.prefilled is not None)

    @property
    def others_have_begun(self) -> bool:
        """True if other sequences may have read the prompt of this one."""
        return self.sequences.num_sequences > 1 and self.prompt_leg_ended.is_set()

    def stats(self, is_prefill: bool = False) -> LegRequestStats:
        """Return vLLM's statistics for the request's next leg."""
        if is_prefill:
            leg = Leg.UNCOUNTED if self.is_prompt_counted else Leg.PREFILL
        else:
            leg = Leg.DECODE if self.is_prompt_counted else Leg.WHOLE
        return LegRequestStats(
            arrival_time=self.request.arrival_time, leg=leg, sequences=self.sequences
        )

    def send(self, output: RequestOutput) -> RequestOutput:
        """Note that ``output`` goes to the client; return it."""
        if self.suspicion.turn is not None:
            self.suspicion.has_progressed(self.progress)
        is_first = self.first_sent_s is None
        if is_first:
            self.first_sent_s = asyncio.get_running_loop().time()
            # The store is not asked while all instances do both.
            if self.index == 0 and not self.notes.cached_tokens:
                self.notes.cached_tokens = output.num_cached_tokens or 0
        if self.prediction is not None and (is_first or output.finished):
            self._compare(self.prediction, is_first, output.finished)
        return output

    def _compare(self, prediction: Prediction, is_first: bool, is_last: bool) -> None:
        """Compare predicted with measured times; an answer in one piece does not show them."""
        route, first_s = prediction.route, self.first_sent_s
        if self.params.output_kind is RequestOutputKind.FINAL_ONLY or first_s is None:
            return
        if is_first:
            what, predicted_s, measured_s = "ttft", route.ttft_s, first_s - prediction.routed_s
        elif is_last and (more := self.num_output_tokens - 1) > 0:
            took_s = asyncio.get_running_loop().time() - first_s
            what, predicted_s, measured_s = "tpot", route.tpot_s, took_s / more
        else:
            return
        if predicted_s is not None and measured_s > 0:
            legs = "one_leg" if route.prefill is None else "two_legs"
            metrics.PREDICTED.labels(what, legs).observe(predicted_s / measured_s)

    def take_other_id(self) -> None:
        """Continue under a new id, since the previous engine may be in the middle of a step.

        Outputs of that step carry the old id and are dropped, even if the request returns to the
        same engine.
        """
        stem = self.request.request_id.removesuffix(f"-m{self._num_ids}")
        self._num_ids += 1
        self.request.request_id = f"{stem}-m{self._num_ids}"

    def start_over(self) -> bool:
        """Discard all that was computed so far; return False, and keep it, if the answer has begun.

        Called when the request's weights are gone: other weights compute other KV and tokens.
        """
        if self.first_sent_s is not None or self.index > 0 or self.others_have_begun:
            return False
        self.is_prompt_counted |= bool(self.tokens_so_far)
        if self.prompt is not None:
            self.prompt.output = None
        self.state, self.weights = None, ""
        self.uncached_tokens = self.num_prompt_tokens
        return True
