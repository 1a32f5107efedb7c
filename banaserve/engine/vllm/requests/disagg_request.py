"""Run of one request over the instances: prefill leg, decode leg, retries and deadline.

``run_request`` is the entry. A leg whose engine dies is tried again elsewhere, at most
``MAX_DEATHS`` times, from the second on as the only one of those that engines may die of; a stream
goes on after the tokens that it has sent.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator, Iterator, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any, NamedTuple, TypeVar

from banaserve.engine.vllm.cluster import Cluster
from banaserve.engine.vllm.compat import engine as compat
from banaserve.engine.vllm.compat.requests import (
    GracefulHTTPError,
    PoolingRequestOutput,
    RequestOutput,
    RequestOutputKind,
)
from banaserve.engine.vllm.continuation import logprob_rows
from banaserve.engine.vllm.instance import DRAINED, REBALANCED, Instance
from banaserve.engine.vllm.monitoring import metrics
from banaserve.engine.vllm.monitoring.leg_stats import (
    IterationByLeg,
    Leg,
    LegRequestStats,
    Sequences,
)
from banaserve.engine.vllm.requests.gathering import Gathering
from banaserve.engine.vllm.requests.legs import decode_leg, prefill_leg
from banaserve.engine.vllm.requests.router import Router, WeightsReplacedError
from banaserve.engine.vllm.requests.trials import Trial
from banaserve.engine.vllm.tracing.events import LegEnded, LegFailed, LegOutput
from banaserve.engine.vllm.tracing.request_log import RequestNotes
from banaserve.errors import DeadlineExceededError, InstanceDeadError
from banaserve.orchestrator.routing.legs import LegReason
from banaserve.types import NO_LIMITS, NOWHERE, InstanceId, RequestLimits, Route

Output = TypeVar("Output")
logger = logging.getLogger(__name__)
MAX_DEATHS = 3
"""So many instances may die one after the other under a request that is alone there; one more
under one that others run beside. Instances are given up after more deaths than that."""
_SUSPECT_DEATHS = 2
"""After so many a request that comes no further waits for its turn to be tried again."""
DEAD = (compat.EngineDeadError, InstanceDeadError)


class LegMovedError(Exception):
    """A leg is to go on at another instance.

    Attributes:
        reason: ``drained``: its instance is being drained or replaced; ``rebalanced``: another has
            fewer requests.
    """

    def __init__(self, reason: str = DRAINED) -> None:
        super().__init__(reason)
        self.reason = reason


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


class LegOutputCollector(compat.RequestOutputCollector):
    """vLLM's collector, in which an error waits behind the output that has come before it.

    In vLLM's it takes the output's place. A stream that goes on elsewhere would lack that text.
    """

    output: RequestOutput | PoolingRequestOutput | Exception | None
    _error: Exception | None = None

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        if isinstance(output, Exception) and isinstance(self.output, RequestOutput):
            self._error = self._error or output
        elif isinstance(self.output, LegMovedError):
            # What the engine puts out until the reader leaves counts; of errors the first does.
            if isinstance(output, RequestOutput):
                self._error, self.output = self.output, output
        else:
            super().put(output)

    async def get(self) -> RequestOutput | PoolingRequestOutput:
        output = await super().get()
        self._raise_next()
        return output

    def get_nowait(self) -> RequestOutput | PoolingRequestOutput | None:
        output = super().get_nowait()
        self._raise_next()
        return output

    def _raise_next(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            super().put(error)


async def next_output(stream: AsyncGenerator[Output, None], deadline: float) -> Output | None:
    """The next one, None after the last.

    The deadline is never around a yield: each output may be asked for by another task.

    Args:
        deadline: On the event loop's clock.

    Raises:
        TimeoutError: It has passed.
    """
    async with asyncio.timeout_at(deadline):
        return await anext(stream, None)


class EnginesDiedError(GracefulHTTPError):
    """Instances have died under a request: tried again and again, it may take down all."""

    def __init__(self, num_deaths: int) -> None:
        super().__init__(
            f"{num_deaths} instances died one after the other under this request, which may be "
            "the cause: it is not tried again",
            HTTPStatus.INTERNAL_SERVER_ERROR,
        )


def failed_by_itself(context: RequestContext, instance: Instance) -> GracefulHTTPError:
    """Returns the error of a request that its engine has ended with one, before any output.

    The engine lives: it would be the same on any other.
    """
    params = context.request.sampling_params
    if params is not None and params.structured_outputs is not None:
        return GracefulHTTPError(
            "the constraint of this structured output has passed the check and does not compile; "
            f"why is in the log of {instance.id}",
            HTTPStatus.BAD_REQUEST,
        )
    return GracefulHTTPError("Internal server error", HTTPStatus.INTERNAL_SERVER_ERROR)


def out_of_time() -> GracefulHTTPError:
    """Counts a request whose deadline has passed; returns the error for its client."""
    metrics.DEADLINES.inc()
    return GracefulHTTPError(
        "the request ran out of its time budget (--request-timeout)", HTTPStatus.GATEWAY_TIMEOUT
    )


def given_up(request_id: str | None, num_deaths: int) -> EnginesDiedError:
    """Counts and names a request that may be what instances die of; returns its error."""
    metrics.GIVEN_UP.inc()
    logger.error("request %s is given up: %d instances died under it", request_id, num_deaths)
    return EnginesDiedError(num_deaths)


@dataclass
class RequestContext:
    """A request as the front door gave it, and its progress.

    Attributes:
        request: Prepared once: tokenised, validated, with its id; one sequence.
        first_token_blocker: Reason for which decode must sample the first token; None for none.
        uncached_tokens: The router's estimate of the tokens that prefill has to compute.
        is_stored: It has no prefill leg because the store has its prompt.
        deadline: On the event loop's clock.
        state: vLLM's front-end state (detokenizer, logprobs) once output has begun.
        split_blocker: Why this request cannot be split into legs, None where it can.
        prefilled: The prompt's KV has been left in the store.
        is_prompt_counted: vLLM's metrics have its prompt, from a prefill leg of its own.
        sequences: Counts of all sequences of the same request.
        num_cached_tokens: So many of its tokens the prefill leg had not to compute.
        num_created_tokens: Number of prompt tokens that the prefill leg has left in caches.
        first: The prefill leg's token and why it stopped there, until it has been sent.
        num_sent: Outputs that have gone to the client.
        aborted: By its id, from outside: it ends where it stands.
        num_deaths: Instances that have died under it since it last came further.
        num_beside: Requests that the instance it runs on has, itself included.
        notes: What becomes of it, for ``banaserve trace``.
        limits: That it names for itself.
        resident_tokens: Of the prompt, those that probably lie in an engine's own cache.
        prediction: Of the routing policy; None where it predicts nothing, or a leg was tried again.
        prompt_leg_ended: Set once the prompt is in the store, or the whole request on its way to
            one instance: other sequences of the same prompt may begin.
        is_sibling: Another sequence of the same request counts as the request.
        has_siblings: It is the one that counts.
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


async def prefill(context: RequestContext, instance: Instance, push_to: str = "") -> None:
    """Run the prefill leg: afterwards the prompt lies in the store and ``context.first`` is set.

    Args:
        push_to: Store of the decode leg's machine, where it is another one; empty for none.
    """
    llm = _client(instance)
    keeps_token = context.first_token_blocker is None
    leg = prefill_leg(context.request, keeps_token, push_to, context.hold, context.num_readers)
    queue = LegOutputCollector(RequestOutputKind.FINAL_ONLY, leg.request_id)
    loop = asyncio.get_running_loop()
    num_tokens = len(context.request.prompt_token_ids or ())
    weights, to_compute = instance.weights, context.to_compute_at(instance.id)
    held = instance.holding(
        to_compute, num_tokens, lambda reason: queue.put(LegMovedError(reason)), is_prompt=True
    )
    with held, _expiring(queue, context.deadline):
        alone, started_s = instance.is_alone, loop.time()
        board, waited_s = instance.board, instance.board.room_wait_s
        context.num_beside = instance.inflight_requests
        context.notes.leg_began("prefill", instance.id, instance.incarnation, leg.request_id)
        try:
            await compat.submit(llm, leg, None, queue, context.stats(is_prefill=True))
            output = await queue.get()
        except BaseException:
            context.num_beside = max(context.num_beside, instance.inflight_requests)
            await _abort(llm, leg.request_id)
            raise
        if alone and board.room_wait_s == waited_s:  # else it has waited for decode, too
            instance.learn_prefill_speed(to_compute, loop.time() - started_s)
    finish_reason = output.outputs[0].finish_reason
    ended = LegEnded("prefill", instance.id, finish_reason, output.num_cached_tokens)
    context.notes.note(ended, leg.request_id)
    if context.aborted:
        return
    if finish_reason == "error":
        raise failed_by_itself(context, instance)
    if finish_reason not in ("length", "stop"):
        raise InstanceDeadError(f"prefill on {instance.id} ended early")
    context.prefilled = context.is_prompt_counted = True
    context.num_cached_tokens = output.num_cached_tokens or 0
    context.num_created_tokens = output.num_cache_creation_tokens or 0
    context.weights = weights
    if keeps_token:
        context.first = output


async def decode(
    context: RequestContext, instance: Instance, gathering: Gathering
) -> AsyncGenerator[RequestOutput, None]:
    """Run the decode leg, or the whole request where nothing has been prefilled."""
    assert context.request.sampling_params is not None
    llm = _client(instance)
    queue = LegOutputCollector(
        context.request.sampling_params.output_kind, context.request.request_id
    )
    waiting = 0 if context.prefilled else context.to_compute_at(instance.id)
    leg_name, num_resumed = "decode" if context.prefilled else "whole", len(context.tokens_so_far)
    num_tokens = len(context.request.prompt_token_ids or ()) + num_resumed
    held = instance.holding(
        waiting,
        num_tokens,
        lambda reason: queue.put(LegMovedError(reason)),
        moved_s=context.rebalanced_s,
    )
    with held as guard, _expiring(queue, context.deadline):
        context.num_beside = instance.inflight_requests
        try:
            is_sent = is_awaited = _begin(context, llm, queue)
            num_before = len(context.tokens_so_far)
            leg: compat.EngineCoreRequest | None = None
            if is_sent:
                context.notes.leg_began(
                    leg_name,
                    instance.id,
                    instance.incarnation,
                    context.request.request_id,
                    num_resumed,
                )
                leg = decode_leg(
                    context.request,
                    context.tokens_so_far,
                    context.prefilled,
                    context.is_stored,
                    context.hold,
                    context.reader,
                    instance.store_beside(context.computed_by) if context.computed_by else "",
                )
                begins = context.prefilled and not num_resumed
                if not (begins and gathering.waits(instance.id)):
                    await _send(llm, leg, queue)
                    leg = None
            finished = False
            while not finished:
                output = queue.get_nowait()
                if output is None and leg is not None:  # the client has what prefill has put out
                    await gathering.gathered(instance.id, queue.ready)
                    if context.aborted:  # the engine, which does not have it, would not say so
                        await _abort(llm, context.request.request_id)
                    output = queue.get_nowait()
                    if output is None:  # it has not ended meanwhile
                        await _send(llm, leg, queue)
                        leg = None
                output = output or await queue.get()
                guard.prefilled()
                assert isinstance(output, RequestOutput)
                finished = output.finished
                if is_awaited and len(context.tokens_so_far) > num_before:
                    context.notes.note(LegOutput(leg_name, instance.id), context.request.request_id)
                    is_awaited = False
                if finished and is_sent:
                    ended = LegEnded(leg_name, instance.id, output.outputs[0].finish_reason)
                    context.notes.note(ended, context.request.request_id)
                    if ended.finish_reason == "error" and not context.tokens_so_far:
                        raise failed_by_itself(context, instance)
                yield output
        except DEAD:
            context.num_beside = max(context.num_beside, instance.inflight_requests)
            compat.forget(llm, context.request.request_id)
            raise
        except LegMovedError:
            compat.forget(llm, context.request.request_id)
            with contextlib.suppress(compat.EngineDeadError):
                await compat.drop(llm, context.request.request_id)
            context.take_other_id()
            raise
        except BaseException:
            await _abort(llm, context.request.request_id)
            raise


async def _send(
    llm: compat.AsyncLLM, leg: compat.EngineCoreRequest, queue: LegOutputCollector
) -> None:
    """Send a leg to its engine; of one that is dead ``queue`` tells."""
    try:
        await compat.send(llm, leg)
    except compat.EngineDeadError as death:
        queue.put(death)  # Behind prefill's token, which the client is still to get.


def _begin(context: RequestContext, llm: compat.AsyncLLM, queue: LegOutputCollector) -> bool:
    """Set up the front-end state on this engine's client; False if the request is over."""
    if context.tokens_so_far:
        compat.adopt(llm, context.state, context.request.request_id, queue)
        metrics.RESUMED.inc()
        return True
    context.state = compat.register(
        llm,
        context.request,
        context.prompt_text,
        queue,
        context.stats(),
        context.first_token_is_there,
    )
    if context.prefilled:  # for the client: to the decode leg all of the prompt is cached
        compat.set_cached_tokens(context.state, context.num_cached_tokens)
    if context.first is None:
        metrics.FIRST_TOKENS.labels("decode").inc()
        return True
    metrics.FIRST_TOKENS.labels("prefill").inc()
    return _put_first_token(context, llm)


def _put_first_token(context: RequestContext, llm: compat.AsyncLLM) -> bool:
    assert context.first is not None
    params, output = context.request.sampling_params, context.first.outputs[0]
    assert params is not None
    finish = None
    if output.finish_reason == "stop":
        finish = compat.FinishReason.STOP
    elif params.max_tokens == 1:
        finish = compat.FinishReason.LENGTH
    num_prompt, num_cached = len(context.request.prompt_token_ids or ()), context.num_cached_tokens
    stats = compat.PrefillStats(
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached,
        num_computed_tokens=num_prompt - num_cached,
    )
    token_id = output.token_ids[-1]
    rows = logprob_rows(output.logprobs[-1], token_id) if output.logprobs else None
    return compat.put_first_token(
        llm,
        context.request.request_id,
        token_id,
        finish,
        output.stop_reason,
        stats,
        IterationByLeg(),
        rows,
    )


async def _ended(context: RequestContext, instance: Instance) -> RequestOutput:
    """The last output of a request that was aborted before its decode leg."""
    assert context.request.sampling_params is not None
    llm = _client(instance)
    queue = LegOutputCollector(
        context.request.sampling_params.output_kind, context.request.request_id
    )
    if context.tokens_so_far:
        compat.adopt(llm, context.state, context.request.request_id, queue)
    else:
        compat.register(llm, context.request, context.prompt_text, queue, context.stats())
    await _abort(llm, context.request.request_id)
    output = await queue.get()
    assert isinstance(output, RequestOutput)
    return output


def _client(instance: Instance) -> compat.AsyncLLM:
    if instance.llm is None:
        raise InstanceDeadError(f"instance {instance.id} is not there")
    return instance.llm


@contextlib.contextmanager
def _expiring(queue: LegOutputCollector, deadline: float) -> Iterator[None]:
    """Wake a reader of ``queue`` with an error when the time budget is spent."""
    timer = asyncio.get_running_loop().call_at(deadline, queue.put, DeadlineExceededError())
    try:
        yield
    finally:
        timer.cancel()


async def _abort(llm: compat.AsyncLLM, request_id: str) -> None:
    with contextlib.suppress(compat.EngineDeadError):
        await llm.abort(request_id, internal=True)


async def run_request(
    context: RequestContext, router: Router
) -> AsyncGenerator[RequestOutput, None]:
    """Run all legs, again elsewhere after a death; one clear error where that is impossible."""
    cluster = router.cluster
    dead: Instance | None = None
    avoided: InstanceId | None = None
    for attempt in itertools.count(1):
        leg, goes_on = "route", False
        turn = contextlib.AsyncExitStack()
        try:
            context.resident_tokens = router.resident_tokens(context.request)
            if context.is_suspect:
                context.trial = await turn.enter_async_context(router.trials.turn(context.deadline))
            async with asyncio.timeout_at(context.deadline):
                if dead is not None and not context.tokens_so_far:
                    # Until then the store keeps the prompt's blocks for it to write.
                    await dead.wait_given_back()
                route = await router.route(
                    context.request,
                    context.uncached_tokens,
                    context.split_blocker,
                    context.notes,
                    context.limits,
                    context.first_token_blocker is not None,
                    context.resident_tokens,
                    context.weights,
                    avoided,
                )
            avoided = None
            context.prediction = (
                Prediction.of(route) if attempt == 1 and not context.is_sibling else None
            )
            leg = "prefill"
            if route.prefill is not None and not context.prefilled and not context.aborted:
                computes, decodes = map(cluster.instance, (route.prefill, route.decode))
                push_to = computes.store_beside(decodes)
                router.lookups.end_hold(context.hold, context.hold_stores)
                context.hold, context.computed_by = router.lookups.new_hold(), computes
                context.hold_stores = (computes.store, decodes.store)
                with decodes.expecting(), router.gathering.coming(route.decode):
                    await prefill(context, computes, push_to)
                if context.prefilled:
                    router.has_computed(route.prefill, context.request)
                context.comes()
            leg = "decode"
            if context.aborted:
                yield context.send(await _ended(context, cluster.instance(route.decode)))
                return
            if route.prefill is not None and _has_left(context, cluster, route.decode):
                async with asyncio.timeout_at(context.deadline):
                    route = await router.route(
                        context.request,
                        context.uncached_tokens,
                        None,
                        context.notes,
                        context.limits,
                        weights=context.weights,
                    )
                context.prediction = None
            context.weights = cluster.instance(route.decode).weights
            context.prompt_leg_ended.set()
            _count_way(context, route, attempt)
            context.is_stored = _comes_from_store(context, route)
            async with contextlib.aclosing(
                decode(context, cluster.instance(route.decode), router.gathering)
            ) as outputs:
                async for output in outputs:
                    context.comes()
                    yield context.send(output)
            router.has_computed(route.decode, context.request, context.tokens_so_far)
            return
        except DEAD as death:
            died_at = _instance_of(leg, route)
            dead = cluster.instances.get(died_at)  # it may have been removed since
            if dead is None or not dead.is_orphaned:
                context.died()
            next_step = "tried again when it is its turn" if context.is_suspect else "tried again"
            is_last = context.is_given_up
            _note_death(context, leg, died_at, death, "given up" if is_last else next_step)
            if is_last:
                raise given_up(context.request.external_req_id, context.num_deaths) from death
            metrics.RETRIES.labels(leg).inc()
            goes_on = True
        except LegMovedError as moved:
            left = route.decode if leg == "decode" or route.prefill is None else route.prefill
            if moved.reason == REBALANCED:
                metrics.REBALANCED.inc()
                avoided, context.rebalanced_s = left, asyncio.get_running_loop().time()
            else:
                metrics.MOVED.inc()
            why = LegFailed(leg, left, moved.reason, context.num_deaths, "goes on elsewhere")
            context.notes.note(why, context.request.request_id)
            goes_on = True
        except WeightsReplacedError:
            if not context.start_over():
                raise
            goes_on = True
        except (DeadlineExceededError, TimeoutError):
            raise out_of_time() from None
        finally:
            if not goes_on:
                router.lookups.end_hold(context.hold, context.hold_stores, context.reader)
            await turn.aclose()
            context.trial = None


def _instance_of(leg: str, route: Route) -> InstanceId:
    instance = route.prefill if leg == "prefill" else route.decode
    assert instance is not None
    return instance


def _has_left(context: RequestContext, cluster: Cluster, decode: InstanceId) -> bool:
    """Whether a decode leg that was routed while its prompt was computed has to go elsewhere."""
    return cluster.has_left_decode(decode) or (
        bool(context.weights) and cluster.instance(decode).weights != context.weights
    )


def _note_death(
    context: RequestContext, leg: str, instance: InstanceId, death: Exception, next_step: str
) -> None:
    why = str(death) or type(death).__name__
    failed = LegFailed(leg, instance, why, context.num_deaths, next_step)
    context.notes.note(failed, context.request.request_id)


def _comes_from_store(context: RequestContext, route: Route) -> bool:
    """Whether ``route`` spares a prefill leg because of what the store has of the prompt."""
    num_prompt = len(context.request.prompt_token_ids or ())
    return (
        route.reason == LegReason.SHORT_PROMPT
        and context.split_blocker is None
        and context.uncached_tokens < num_prompt
    )


def _count_way(context: RequestContext, route: Route, attempt: int) -> None:
    if attempt == 1 and not context.is_sibling:
        way = "one_leg" if route.prefill is None else "two_legs"
        metrics.REQUESTS.labels(way, context.split_blocker or str(route.reason)).inc()
