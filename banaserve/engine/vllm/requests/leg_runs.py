"""Run of one leg of a request at an instance: prefill, or decode, or the whole request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from http import HTTPStatus

from banaserve.engine.vllm.compat import engine as compat
from banaserve.engine.vllm.compat.requests import (
    GracefulHTTPError,
    RequestOutput,
    RequestOutputKind,
)
from banaserve.engine.vllm.continuation import logprob_rows
from banaserve.engine.vllm.instance import Instance
from banaserve.engine.vllm.monitoring import metrics
from banaserve.engine.vllm.monitoring.leg_stats import IterationByLeg
from banaserve.engine.vllm.requests.decode_batching import DecodeBatching
from banaserve.engine.vllm.requests.leg_output import LegMovedError, LegOutputCollector
from banaserve.engine.vllm.requests.legs import decode_leg, prefill_leg
from banaserve.engine.vllm.requests.request_context import RequestContext
from banaserve.engine.vllm.tracing.events import LegEnded, LegOutput
from banaserve.errors import DeadlineExceededError, InstanceDeadError

DEAD = (compat.EngineDeadError, InstanceDeadError)


def failed_by_itself(context: RequestContext, instance: Instance) -> GracefulHTTPError:
    """Return the error for a request that its engine ended with an error before any output.

    The engine is alive, so any other engine would end the request with the same error.
    """
    params = context.request.sampling_params
    if params is not None and params.structured_outputs is not None:
        return GracefulHTTPError(
            "the constraint of this structured output has passed the check and does not compile; "
            f"why is in the log of {instance.id}",
            HTTPStatus.BAD_REQUEST,
        )
    return GracefulHTTPError("Internal server error", HTTPStatus.INTERNAL_SERVER_ERROR)


async def prefill(context: RequestContext, instance: Instance, push_to: str = "") -> None:
    """Run the prefill leg: it puts the prompt's KV into the store, and its token into ``context``.

    Args:
        push_to: ``HOST:PORT`` of the store on the decode leg's machine, if that is another machine;
            empty for none.
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
        if alone and board.room_wait_s == waited_s:  # else it also waited for decode to free room
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
    context: RequestContext, instance: Instance, batching: DecodeBatching
) -> AsyncGenerator[RequestOutput, None]:
    """Run the decode leg, or the whole request if there was no prefill leg."""
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
                if not (begins and batching.waits(instance.id)):
                    await _send(llm, leg, queue)
                    leg = None
            finished = False
            while not finished:
                output = queue.get_nowait()
                if output is None and leg is not None:  # the client has prefill's output
                    await batching.wait_for_group(instance.id, queue.ready)
                    if context.aborted:  # the engine does not have the leg yet: end it here
                        await _abort(llm, context.request.request_id)
                    output = queue.get_nowait()
                    if output is None:  # the request has not ended meanwhile
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
    """Send a leg to its engine; if the engine is dead, put the error into ``queue``."""
    try:
        await compat.send(llm, leg)
    except compat.EngineDeadError as death:
        queue.put(death)  # behind prefill's token, which the client must still get


def _begin(context: RequestContext, llm: compat.AsyncLLM, queue: LegOutputCollector) -> bool:
    """Set up the front-end state on this engine's client; return False if the request is over."""
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
    if context.prefilled:  # report prefill's count: for the decode leg, all tokens are cached
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


async def aborted_output(context: RequestContext, instance: Instance) -> RequestOutput:
    """Return the last output of a request that was aborted before its decode leg."""
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
    """Wake the reader of ``queue`` with an error when the deadline has passed."""
    timer = asyncio.get_running_loop().call_at(deadline, queue.put, DeadlineExceededError())
    try:
        yield
    finally:
        timer.cancel()


async def _abort(llm: compat.AsyncLLM, request_id: str) -> None:
    with contextlib.suppress(compat.EngineDeadError):
        await llm.abort(request_id, internal=True)
