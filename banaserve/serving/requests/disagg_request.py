"""Life of one request: route, prefill leg, hand-over, decode leg, and recovery from failures.

``run_request`` reads from top to bottom as the request goes; ``recover`` is the only place that
decides what follows a failure. A leg whose engine dies is retried elsewhere. After two deaths
without progress the request is a suspect, and suspects are retried one at a time; after at least
``MAX_DEATHS`` deaths it is given up. A stream continues after the tokens that the client has.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator
from dataclasses import replace
from http import HTTPStatus

from banaserve.base.errors import DeadlineExceededError, InstanceDeadError
from banaserve.base.types import NOWHERE, RequestId, RequestView
from banaserve.contracts.trace_events import FirstToken, LegBegan, LegEnded, LegFailed, LegOutput
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.requests import GracefulHTTPError, RequestOutput, RequestOutputKind
from banaserve.engine.connector.handover import Handover
from banaserve.engine.continuation import logprob_rows
from banaserve.orchestrator.control.routing.legs import LegReason
from banaserve.serving.instances.instance import REBALANCED, Instance
from banaserve.serving.monitoring import metrics
from banaserve.serving.monitoring.leg_stats import IterationByLeg
from banaserve.serving.requests.intake import load_adapter
from banaserve.serving.requests.legs import (
    LegMovedError,
    LegOutputCollector,
    decode_leg,
    prefill_leg,
)
from banaserve.serving.requests.request_context import Prediction, RequestContext, StoredPrompt
from banaserve.serving.requests.router import RoutedLegs, Router, WeightsReplacedError
from banaserve.serving.requests.suspects import given_up

DEAD = (compat.EngineDeadError, InstanceDeadError)


# ---- the request's life


async def run_request(
    context: RequestContext, router: Router
) -> AsyncGenerator[RequestOutput, None]:
    """Run all legs, and retry elsewhere after a failure; raise one clear error if impossible."""
    try:
        while True:
            leg = "route"
            legs: RoutedLegs | None = None
            try:
                legs = await choose(context, router)
                if legs.prefill is not None and not (context.prefilled or context.aborted):
                    leg = "prefill"
                    await prefill(context, router, legs, legs.prefill)
                leg = "decode"
                legs = await hand_over(context, router, legs)
                await _load_adapter(context, legs.decode)
                if context.aborted:
                    yield context.send(await aborted_output(context, legs.decode))
                    return
                async with contextlib.aclosing(decode(context, router, legs)) as outputs:
                    async for output in outputs:
                        yield context.send(output)
                router.residency.computed(legs.decode, context.request, context.tokens_so_far)
                return
            except Exception as error:
                recover(context, router, error, leg, legs)
    finally:
        context.suspicion.end_turn()
        router.lookups.end_hold(context.hold, context.index)


async def choose(context: RequestContext, router: Router) -> RoutedLegs:
    """Choose the instances of the next attempt, once the request may run."""
    request, params, num_tokens = context.request, context.params, context.num_prompt_tokens
    asked = RequestView(
        RequestId(request.request_id),
        num_tokens,
        num_tokens - context.uncached_tokens,
        params.max_tokens or 0,
        context.limits,
        context.blockers.split is None,
        context.blockers.first_token is not None,
        router.residency.found(request),
    )
    suspicion = context.suspicion
    if suspicion.num_deaths and suspicion.must_wait(context.progress):
        await suspicion.wait_for_turn(router.retry_turns, context.deadline)
    async with asyncio.timeout_at(context.deadline):
        if context.dead is not None and not context.tokens_so_far:
            # Until then the store keeps the prompt's blocks reserved for the dead engine.
            await context.dead.wait_given_back()
        legs = await router.route(
            asked, context.blockers.split, context.notes, context.weights, context.avoided
        )
    is_predicted = legs.route.ttft_s is not None and context.is_first_try and context.index == 0
    now_s = asyncio.get_running_loop().time()
    context.prediction = Prediction(legs.route, now_s) if is_predicted else None
    return legs


async def prefill(
    context: RequestContext, router: Router, legs: RoutedLegs, instance: Instance
) -> None:
    """Run the prefill leg: it leaves the prompt's KV in the store, and its token in ``context``."""
    await _load_adapter(context, instance)
    llm, stats = _client(instance), context.stats(is_prefill=True)
    is_for_all = not context.others_have_begun and context.index == 0
    hold = router.lookups.hold(context.hold, instance.place.store, legs.decode.place.store)
    prompt = context.prompt = StoredPrompt(instance, hold)
    to_compute, weights = legs.asked.to_compute_at(instance.id), instance.weights
    queue = LegOutputCollector(RequestOutputKind.FINAL_ONLY, f"{context.request.request_id}-p")
    held = instance.holding(to_compute, context.num_prompt_tokens, queue.move, starts_over=True)
    with router.decode_batching.coming(legs.decode), held:
        leg = prefill_leg(
            context.request,
            context.blockers.first_token is None,
            Handover(
                leaves_tail=True,
                push_to=instance.store_beside(legs.decode),
                hold=hold.number,
                num_readers=context.sequences.num_sequences if is_for_all else 1,
                keep_s=context.keep_s,
            ),
        )
        loop = asyncio.get_running_loop()
        alone, started_s = instance.is_alone, loop.time()
        board, waited_s = instance.board, instance.board.room_wait_s
        context.suspicion.num_beside = instance.inflight_requests
        began = LegBegan("prefill", instance.id, leg.request_id)
        context.notes.note(began, leg.request_id, instance.incarnation)
        with queue.expiring(context.deadline):
            try:
                await compat.submit(llm, leg, None, queue, stats)
                output = await queue.get()
            except BaseException:
                _count_beside(context, instance)
                await _abort(llm, leg.request_id)
                raise
        if alone and board.room_wait_s == waited_s:  # else it also waited for decode to free room
            instance.learn_prefill_speed(to_compute, loop.time() - started_s)
    assert isinstance(output, RequestOutput)
    finish_reason = output.outputs[0].finish_reason
    ended = LegEnded("prefill", instance.id, finish_reason, output.num_cached_tokens)
    context.notes.note(ended, leg.request_id)
    # A second call that aborts, as sleep makes, also ends what came after the requests were marked.
    context.aborted = context.aborted or finish_reason == "abort"
    if context.aborted:
        return
    if finish_reason == "error":
        raise failed_by_itself(context, instance)
    if finish_reason not in ("length", "stop"):
        raise InstanceDeadError(f"prefill on {instance.id} ended early")
    prompt.output, context.weights, context.is_prompt_counted = output, weights, True
    router.residency.computed(instance, context.request)
    if context.suspicion.turn is not None:
        context.suspicion.has_progressed(context.progress)


async def hand_over(context: RequestContext, router: Router, legs: RoutedLegs) -> RoutedLegs:
    """Return the legs of the decode leg; it goes elsewhere if its instance has left meanwhile."""
    chosen = legs.decode
    if legs.prefill is not None and (
        router.cluster.instances.get(chosen.id) is not chosen  # removed
        or chosen.has_left_decode
        or (context.weights and chosen.weights != context.weights)
    ):
        asked = replace(legs.asked, first_token_waits=False, resident_tokens=NOWHERE)
        async with asyncio.timeout_at(context.deadline):
            legs = await router.route(asked, None, context.notes, context.weights)
        context.prediction = None
    context.weights = legs.decode.weights
    context.prompt_leg_ended.set()
    if context.is_first_try and context.index == 0:
        way = "one_leg" if legs.prefill is None else "two_legs"
        metrics.REQUESTS.labels(way, context.blockers.split or str(legs.route.reason)).inc()
    return legs


async def decode(
    context: RequestContext, router: Router, legs: RoutedLegs
) -> AsyncGenerator[RequestOutput, None]:
    """Run the decode leg, or the whole request if there was no prefill leg."""
    instance, batching = legs.decode, router.decode_batching
    llm, request_id = _client(instance), context.request.request_id
    queue = LegOutputCollector(context.params.output_kind, request_id)
    name, num_resumed = "decode" if context.prefilled else "whole", context.num_output_tokens
    to_compute = 0 if context.prefilled else legs.asked.to_compute_at(instance.id)
    num_tokens = context.num_prompt_tokens + num_resumed
    handover = _handover_to_decode(context, legs)
    held = instance.holding(to_compute, num_tokens, queue.move, moved_s=context.moved_s)
    with held as counted, queue.expiring(context.deadline):
        context.suspicion.num_beside = instance.inflight_requests
        try:
            is_sent = is_awaited = _begin(context, instance, queue)
            num_before = context.num_output_tokens
            unsent: compat.EngineCoreRequest | None = None
            if is_sent:
                began = LegBegan(name, instance.id, request_id, num_resumed)
                context.notes.note(began, request_id, instance.incarnation)
                unsent = decode_leg(context.request, context.tokens_so_far, handover)
                begins = context.prefilled and not num_resumed
                if not (begins and batching.waits(instance)):
                    await _send(llm, unsent, queue)
                    unsent = None
            finished = False
            while not finished:
                output = queue.get_nowait()
                if output is None and unsent is not None:  # the client has prefill's output
                    await batching.wait_for_group(instance, queue.ready)
                    if context.aborted:  # the engine does not have the leg yet: end it here
                        await _abort(llm, request_id)
                    output = queue.get_nowait()
                    if output is None:  # the request has not ended meanwhile
                        await _send(llm, unsent, queue)
                        unsent = None
                output = output or await queue.get()
                counted.prefilled()
                assert isinstance(output, RequestOutput)
                finished = output.finished
                if is_awaited and context.num_output_tokens > num_before:
                    context.notes.note(LegOutput(name, instance.id), request_id)
                    is_awaited = False
                if finished and is_sent:
                    ended = LegEnded(name, instance.id, output.outputs[0].finish_reason)
                    context.notes.note(ended, request_id)
                    if ended.finish_reason == "error" and not context.tokens_so_far:
                        raise failed_by_itself(context, instance)
                yield output
        except DEAD:
            _count_beside(context, instance)
            compat.forget(llm, request_id)
            raise
        except LegMovedError:
            compat.forget(llm, request_id)
            with contextlib.suppress(compat.EngineDeadError):
                await compat.drop(llm, request_id)
            context.take_other_id()
            raise
        except BaseException:
            await _abort(llm, request_id)
            raise


def _begin(context: RequestContext, instance: Instance, queue: LegOutputCollector) -> bool:
    """Set up the front-end state on this engine's client; return False if the request is over."""
    llm = _client(instance)
    if context.tokens_so_far:
        compat.adopt(llm, context.state, context.request.request_id, queue)
        metrics.RESUMED.inc()
        return True
    prefilled, first = context.prefilled, context.first
    source = "decode" if first is None else "prefill"
    event = FirstToken(source, context.blockers.first_token if prefilled else None)
    stats, prompt = context.stats(), context.prompt

    def on_first_token() -> None:
        if context.index == 0:
            context.notes.note(event)
        if context.suspicion.turn is not None:  # an answer in one piece is sent much later
            context.suspicion.has_progressed(context.progress)

    # vLLM counts from where a request is first scheduled; each machine has a clock of its own.
    if prompt and prompt.output and prompt.computed_by.place.node == instance.place.node:
        began = prompt.output.metrics
        assert began is not None
        stats.queued_ts, stats.scheduled_ts = began.queued_ts, began.scheduled_ts
    context.state = compat.register(
        llm,
        context.request,
        context.prompt_text,
        queue,
        stats,
        on_first_token,
        prefilled,
    )
    metrics.FIRST_TOKENS.labels(source).inc()
    return first is None or _put_first_token(context, llm, first)


def _put_first_token(context: RequestContext, llm: compat.AsyncLLM, first: RequestOutput) -> bool:
    output, finish = first.outputs[0], None
    if output.finish_reason == "stop":
        finish = compat.FinishReason.STOP
    elif context.params.max_tokens == 1:
        finish = compat.FinishReason.LENGTH
    num_prompt, num_cached = context.num_prompt_tokens, first.num_cached_tokens or 0
    stats = compat.PrefillStats(
        num_prompt_tokens=num_prompt,
        num_cached_tokens=num_cached,
        num_computed_tokens=num_prompt - num_cached,
    )
    token_id = output.token_ids[-1]
    rows = logprob_rows(output.logprobs[-1], token_id) if output.logprobs else None
    weights = output.weight_versions[-1].version if output.weight_versions else None
    return compat.put_first_token(
        llm,
        context.request.request_id,
        token_id,
        finish,
        output.stop_reason,
        stats,
        IterationByLeg(),
        rows,
        weights,
    )


async def _send(
    llm: compat.AsyncLLM, leg: compat.EngineCoreRequest, queue: LegOutputCollector
) -> None:
    """Send a leg to its engine; if the engine is dead, put the error into ``queue``."""
    try:
        await compat.send(llm, leg)
    except compat.EngineDeadError as death:
        queue.put(death)  # behind prefill's token, which the client must still get


async def aborted_output(context: RequestContext, instance: Instance) -> RequestOutput:
    """Return the last output of a request that was aborted before its decode leg."""
    llm, request_id = _client(instance), context.request.request_id
    queue = LegOutputCollector(context.params.output_kind, request_id)
    if context.tokens_so_far:
        compat.adopt(llm, context.state, request_id, queue)
    else:
        compat.register(llm, context.request, context.prompt_text, queue, context.stats())
    await _abort(llm, request_id)
    output = await queue.get()
    assert isinstance(output, RequestOutput)
    return output


# ---- failures


def recover(
    context: RequestContext, router: Router, error: Exception, leg: str, legs: RoutedLegs | None
) -> None:
    """Note in ``context`` what the next attempt takes into account after ``leg`` has failed.

    Raises:
        GracefulHTTPError: The request's time is over, or instances probably die of it.
        Exception: ``error`` itself, if another attempt would meet it too.
    """
    suspicion = context.suspicion
    instance = None if legs is None else legs.prefill if leg == "prefill" else legs.decode
    context.is_first_try = False
    if leg != "route":
        context.avoided = None
    match error:
        case compat.EngineDeadError() | InstanceDeadError() if instance is not None:
            dead = router.cluster.instances.get(instance.id)  # None if removed meanwhile
            if dead is None or not dead.is_orphaned:
                suspicion.died(context.progress)
            next_step = "tried again"
            if suspicion.is_certain:
                next_step = "given up"
            elif suspicion.must_wait(context.progress):
                next_step = "tried again when it is its turn"
            _note_failure(context, leg, instance, error, next_step)
            if suspicion.is_certain:
                raise given_up(context.request.external_req_id, suspicion.num_deaths) from error
            metrics.RETRIES.labels(leg).inc()
            context.dead = dead
        case LegMovedError() if instance is not None:
            _note_failure(context, leg, instance, error, "goes on elsewhere")
            if error.reason == REBALANCED:
                metrics.REBALANCED.inc()
                context.avoided = instance.id
                context.moved_s = asyncio.get_running_loop().time()
            else:
                metrics.MOVED.inc()
        case WeightsReplacedError() if context.start_over():
            pass
        case DeadlineExceededError() | TimeoutError():
            raise out_of_time() from None
        case _:
            raise error
    suspicion.end_turn()


def out_of_time() -> GracefulHTTPError:
    """Count a request whose deadline has passed; return the error for its client."""
    metrics.DEADLINES.inc()
    return GracefulHTTPError(
        "the request ran out of its time budget (--request-timeout)", HTTPStatus.GATEWAY_TIMEOUT
    )


def failed_by_itself(context: RequestContext, instance: Instance) -> GracefulHTTPError:
    """Return the error for a request that its engine ended with an error before any output.

    The engine is alive, so any other engine would end the request with the same error.
    """
    if context.params.structured_outputs is not None:
        return GracefulHTTPError(
            "the constraint of this structured output does not compile, or excludes all that "
            f"the request allows; why is in the log of {instance.id}",
            HTTPStatus.BAD_REQUEST,
        )
    return GracefulHTTPError("Internal server error", HTTPStatus.INTERNAL_SERVER_ERROR)


def _note_failure(
    context: RequestContext, leg: str, instance: Instance, error: Exception, next_step: str
) -> None:
    why, num_deaths = str(error) or type(error).__name__, context.suspicion.num_deaths
    failed = LegFailed(leg, instance.id, why, num_deaths, next_step)
    context.notes.note(failed, context.request.request_id)


def _handover_to_decode(context: RequestContext, legs: RoutedLegs) -> Handover | None:
    """Return the facts about the prompt's KV in the store; None if the engine finds out itself."""
    prompt = context.prompt
    if prompt is not None and prompt.output is not None:
        return Handover(
            tokens=context.num_prompt_tokens,
            hold=prompt.hold.number,
            reader=context.index,
            pushed_from=legs.decode.store_beside(prompt.computed_by),
            keep_s=context.keep_s,
        )
    is_stored = (
        legs.route.reason == LegReason.SHORT_PROMPT
        and context.blockers.split is None
        and context.uncached_tokens < context.num_prompt_tokens
    )
    if not (is_stored or context.keep_s):
        return None
    return Handover(is_stored=is_stored, keep_s=context.keep_s)


def _count_beside(context: RequestContext, instance: Instance) -> None:
    """Count the requests that share the blame for a death: as many as at the leg's begin or end."""
    suspicion = context.suspicion
    suspicion.num_beside = max(suspicion.num_beside, instance.inflight_requests)


def _client(instance: Instance) -> compat.AsyncLLM:
    if instance.llm is None:
        raise InstanceDeadError(f"instance {instance.id} is not there")
    return instance.llm


async def _load_adapter(context: RequestContext, instance: Instance) -> None:
    if (adapter := context.request.lora_request) is not None:
        async with asyncio.timeout_at(context.deadline):
            await load_adapter(instance, adapter)


async def _abort(llm: compat.AsyncLLM, request_id: str) -> None:
    with contextlib.suppress(compat.EngineDeadError):
        await llm.abort(request_id, internal=True)
