"""A request over the instances, and its progress: what its legs hand to each other."""

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
from banaserve.engine.vllm.requests.trials import Trial
from banaserve.engine.vllm.tracing.request_log import RequestNotes
from banaserve.types import NO_LIMITS, NOWHERE, InstanceId, RequestLimits, Route

MAX_DEATHS = 3
"""So many instances may die one after the other under a request that is alone there; one more
under one that others run beside. Instances are given up after more deaths than that."""
_SUSPECT_DEATHS = 2
"""After so many a request that comes no further waits for its turn to be tried again."""


class Prediction(NamedTuple):
    """Times that the routing policy predicted.

    Attributes:
        routed_s: On the event loop's clock.
    """

    route: Route
    routed_s: float

    @classmethod
    def of(cls, route: Route) -> Prediction | None:
        """The prediction made with ``route`` a moment ago; None where the policy makes none."""
        if route.ttft_s is None:
            return None
        return cls(route, asyncio.get_running_loop().time())

    def observe_ttft(self, now_s: float) -> None:
        """The first output has come."""
        self._observe("ttft", self.route.ttft_s, now_s - self.routed_s)

    def observe_tpot(self, measured_s: float) -> None:
        """The last output has come, each after the first in ``measured_s`` on average."""
        self._observe("tpot", self.route.tpot_s, measured_s)

    def _observe(self, what: str, predicted_s: float | None, measured_s: float) -> None:
        if predicted_s is not None and measured_s > 0:
            legs = "one_leg" if self.route.prefill is None else "two_legs"
            metrics.PREDICTED.labels(what, legs).observe(predicted_s / measured_s)


@dataclass
class RequestContext:
    """A request as the front door gave it, and its progress.

    Attributes:
        request: Prepared once: tokenised, validated, with its id; one sequence.
        first_token_blocker: Reason for which decode must sample the first token; None for none.
        uncached_tokens: The router's estimate of the tokens that prefill has to compute.
        is_stored: Flag: it has no prefill leg because the store has its prompt.
        deadline: On the event loop's clock.
        state: vLLM's front-end state (detokenizer, logprobs) once output has begun.
        split_blocker: Why this request cannot be split into legs, None where it can.
        prefilled: The prompt's KV has been left in the store.
        is_prompt_counted: vLLM's metrics have its prompt, from a prefill leg of its own.
        sequences: Counts of all sequences of the same request.
        num_cached_tokens: Number of prompt tokens that the prefill leg did not compute.
        num_created_tokens: Number of prompt tokens that the prefill leg has left in caches.
        first: The prefill leg's token and why it stopped there, until it has been sent.
        num_sent: Outputs that have gone to the client.
        aborted: By its id, from outside: it ends where it stands.
        num_deaths: Instances that have died under it since it last came further.
        num_beside: Requests that the instance it runs on has, itself included.
        notes: Events of the request, for ``banaserve trace``.
        limits: Latency limits that the request names for itself.
        resident_tokens: Number of prompt tokens that are probably in each engine's own cache.
        prediction: Times predicted by the routing policy; None if none or a leg ran again.
        prompt_leg_ended: Set once the prompt is in the store, or the whole request on its way to
            one instance: other sequences of the same prompt may begin.
        is_sibling: Another sequence of the same request counts as the request.
        has_siblings: Flag: it counts as the request, and other sequences of it do not.
        trial: Its turn to be tried again, where instances have died under it; None for none.
        weights: Of the engines that compute it; empty until the first has.
        hold: Number under which the store holds its prompt's blocks for decode; 0 for none.
        reader: Its number among the sequences that read these blocks.
        computed_by: Instance that has left its prompt in the store; None before one has.
        hold_stores: Stores that hold its prompt's blocks; see ``PrefixLookups.end_hold``.
        rebalanced_s: Time of its last move by the rebalancer, on the event loop's clock; None for
            none.
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
    trial: Trial | None = None
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
        """An instance has died under it: it may be the cause, less so where it had come further.

        Each of those that ran there has its share of the blame. One on trial has half of it at
        least: the others had come further, or had just begun.
        """
        if self._come > self._furthest:
            self.num_deaths, self._blame, self._furthest = 0, 0.0, self._come
        self.num_deaths += 1
        is_tried = self.trial is not None and self.trial.is_on
        self._blame += 1.0 / min(self.num_beside, 2 if is_tried else self.num_beside)

    def take_other_id(self) -> None:
        """Go on under an id of its own: the last one's engine may be in the middle of a step.

        What that puts out is nobody's then, also where the request comes back to that engine.
        """
        stem = self.request.request_id.removesuffix(f"-m{self._num_ids}")
        self._num_ids += 1
        self.request.request_id = f"{stem}-m{self._num_ids}"

    def comes(self) -> None:
        """End its trial where it has come further than it was when an instance died under it."""
        if self.trial is not None and self._come > self._furthest:
            self.trial.end()

    @property
    def num_readers(self) -> int:
        """Number of sequences that will read the prompt that its prefill leg leaves."""
        is_for_all = self.has_siblings and not self.prompt_leg_ended.is_set()
        return self.sequences.num_sequences if is_for_all else 1

    @property
    def _come(self) -> int:
        return len(self.tokens_so_far) + self.prefilled

    @property
    def is_suspect(self) -> bool:
        """Instances have died under it, and since then it has come no further."""
        return self.num_deaths >= _SUSPECT_DEATHS and self._come <= self._furthest

    def start_over(self) -> bool:
        """Forget what has been computed where nothing of the answer is of that; False where it is.

        For weights that are gone: other ones would not give the same.
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
        """Instances die of it, as far as one can tell."""
        return self.num_deaths >= MAX_DEATHS and self._blame >= 1.0

    def to_compute_at(self, instance_id: InstanceId) -> int:
        """Tokens of the prompt that the instance has to compute, as far as the router knows."""
        num_tokens = len(self.request.prompt_token_ids or ())
        return min(self.uncached_tokens, num_tokens - self.resident_tokens.get(instance_id, 0))

    def stats(self, is_prefill: bool = False) -> LegRequestStats:
        """vLLM's statistics of its next leg."""
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
        """Output tokens so far."""
        return len(self.tokens_so_far)

    def first_token_is_there(self) -> None:
        """Note when, whether or not it goes to the client at once."""
        if self.prefilled:  # to the decode leg all of the prompt is cached
            compat.set_created_tokens(self.state, self.num_created_tokens)
        if not self.is_sibling:
            source = "decode" if self.first is None else "prefill"
            self.notes.first_token(source, self.first_token_blocker if self.prefilled else None)

    def send(self, output: RequestOutput) -> RequestOutput:
        """``output`` goes to the client."""
        self.num_sent += 1
        self._compare(output)
        # The store is not asked while all instances do both.
        if self.num_sent == 1 and not self.is_sibling and not self.notes.cached_tokens:
            self.notes.cached_tokens = output.num_cached_tokens or 0
        if output.finished:
            self.notes.finish_reason = output.outputs[0].finish_reason
        return output

    def _compare(self, output: RequestOutput) -> None:
        """Hold what was predicted against what has come, where it ran as it was routed first.

        An answer that is not streamed tells nothing of its tokens' times.
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
