"""Run of one request over the instances: prefill leg, decode leg, retries and deadline.

``run_request`` is the entry point. A leg whose engine dies is retried elsewhere. After two deaths
without progress the request is a suspect, and suspects are retried one at a time; after at least
``MAX_DEATHS`` deaths it is given up (``RequestContext.is_given_up``). A stream continues after the
tokens that the client already has.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import AsyncGenerator
from http import HTTPStatus

from banaserve.engine.vllm.cluster import Cluster
from banaserve.engine.vllm.compat.requests import GracefulHTTPError, RequestOutput
from banaserve.engine.vllm.instance import REBALANCED, Instance
from banaserve.engine.vllm.monitoring import metrics
from banaserve.engine.vllm.requests.leg_output import LegMovedError
from banaserve.engine.vllm.requests.leg_runs import DEAD, aborted_output, decode, prefill
from banaserve.engine.vllm.requests.request_context import Prediction, RequestContext
from banaserve.engine.vllm.requests.router import Router, WeightsReplacedError
from banaserve.engine.vllm.tracing.events import LegFailed
from banaserve.errors import DeadlineExceededError
from banaserve.orchestrator.routing.legs import LegReason
from banaserve.types import InstanceId, Route

logger = logging.getLogger(__name__)


class EnginesDiedError(GracefulHTTPError):
    """Error of a request that is not retried, since it may be what its instances died of.

    Retried without end, such a request could kill all instances.
    """

    def __init__(self, num_deaths: int) -> None:
        super().__init__(
            f"{num_deaths} instances died one after the other under this request, which may be "
            "the cause: it is not tried again",
            HTTPStatus.INTERNAL_SERVER_ERROR,
        )


def out_of_time() -> GracefulHTTPError:
    """Count a request whose deadline has passed; return the error for its client."""
    metrics.DEADLINES.inc()
    return GracefulHTTPError(
        "the request ran out of its time budget (--request-timeout)", HTTPStatus.GATEWAY_TIMEOUT
    )


def given_up(request_id: str | None, num_deaths: int) -> EnginesDiedError:
    """Count and log a request that instances may die of; return the error for its client."""
    metrics.GIVEN_UP.inc()
    logger.error("request %s is given up: %d instances died under it", request_id, num_deaths)
    return EnginesDiedError(num_deaths)


async def run_request(
    context: RequestContext, router: Router
) -> AsyncGenerator[RequestOutput, None]:
    """Run all legs, and retry elsewhere after a death; raise one clear error if impossible."""
    cluster = router.cluster
    dead: Instance | None = None
    avoided: InstanceId | None = None
    for attempt in itertools.count(1):
        leg, goes_on = "route", False
        turn = contextlib.AsyncExitStack()
        try:
            context.resident_tokens = router.resident_tokens(context.request)
            if context.is_suspect:
                context.retry_turn = await turn.enter_async_context(
                    router.retry_turns.turn(context.deadline)
                )
            async with asyncio.timeout_at(context.deadline):
                if dead is not None and not context.tokens_so_far:
                    # Until then the store keeps the prompt's blocks reserved for the dead engine.
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
                with decodes.expecting(), router.decode_batching.coming(route.decode):
                    await prefill(context, computes, push_to)
                if context.prefilled:
                    router.has_computed(route.prefill, context.request)
                context.comes()
            leg = "decode"
            if context.aborted:
                yield context.send(await aborted_output(context, cluster.instance(route.decode)))
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
                decode(context, cluster.instance(route.decode), router.decode_batching)
            ) as outputs:
                async for output in outputs:
                    context.comes()
                    yield context.send(output)
            router.has_computed(route.decode, context.request, context.tokens_so_far)
            return
        except DEAD as death:
            died_at = _instance_of(leg, route)
            dead = cluster.instances.get(died_at)  # None if removed meanwhile
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
            context.retry_turn = None


def _instance_of(leg: str, route: Route) -> InstanceId:
    instance = route.prefill if leg == "prefill" else route.decode
    assert instance is not None
    return instance


def _has_left(context: RequestContext, cluster: Cluster, decode: InstanceId) -> bool:
    """Return whether a decode leg, routed before its prompt was computed, must go elsewhere."""
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
    """Return whether ``route`` has no prefill leg because the store has part of the prompt."""
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
