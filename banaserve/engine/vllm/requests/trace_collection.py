"""Put together what all processes have noted of one request."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol

from banaserve.engine.vllm.compat import engine as compat
from banaserve.engine.vllm.rpc.engine_api import CoreApi
from banaserve.engine.vllm.rpc.typed_rpc import call
from banaserve.engine.vllm.tracing.events import (
    KEPT_REQUESTS,
    EngineNotes,
    RequestEvent,
    RequestTrace,
    TraceLine,
)
from banaserve.engine.vllm.tracing.request_log import RequestNotes, TracedLeg
from banaserve.errors import ProtocolError
from banaserve.types import InstanceId

FRONT_DOOR = "front door"
_ANSWER_S = 10.0
"""An engine answers between two steps, and one with a long prompt takes its time."""


class TracedInstance(Protocol):
    """The part of an ``Instance`` that a trace needs."""

    incarnation: int
    llm: compat.AsyncLLM | None


async def trace_of(
    notes: RequestNotes, instances: Mapping[InstanceId, TracedInstance]
) -> RequestTrace:
    """Returns the request's trace; asks the engines that it ran on, all at once.

    An engine that does not answer is named in ``missing``: this never raises for one.
    """
    legs = list(dict.fromkeys(notes.legs))
    answers = await asyncio.gather(*(_ask(leg, instances) for leg in legs))
    timed: list[tuple[float, str, RequestEvent]] = [
        (at_s, FRONT_DOOR, event) for at_s, event in notes.events()
    ]
    missing = _dropped(FRONT_DOOR, notes.num_dropped)
    for leg, answer in zip(legs, answers, strict=True):
        if isinstance(answer, str):
            missing.append(answer)
            continue
        for found in answer:
            timed += [(at_s, leg.instance, event) for at_s, event in found.events]
            missing += _dropped(leg.instance, found.num_dropped)
    timed.sort(key=lambda one: one[0])
    lines = [TraceLine(at_s - notes.arrived_s, process, event) for at_s, process, event in timed]
    return RequestTrace(notes.summary(), lines, list(dict.fromkeys(missing)))


def _dropped(process: str, num_dropped: int) -> list[str]:
    return [f"{num_dropped} later events of {process} were not kept"] if num_dropped else []


async def _ask(
    leg: TracedLeg, instances: Mapping[InstanceId, TracedInstance]
) -> Sequence[EngineNotes] | str:
    """An engine's notes of a leg, or why there are none."""
    name = leg.instance
    instance = instances.get(InstanceId(name))
    if instance is None:
        return f"{name} has been removed, and its notes with it"
    if instance.llm is None:
        return f"{name} is down, and its notes with it"
    if instance.incarnation != leg.incarnation:
        return f"{name} was started again since, and its notes are lost"
    try:
        async with asyncio.timeout(_ANSWER_S):
            asked = call(CoreApi.banaserve_notes, leg.name)
            found = asked.read(await compat.call_utility(instance.llm, asked.name, *asked.args))
    except TimeoutError:
        return f"{name} has not answered in {_ANSWER_S:.0f} s"
    except compat.EngineDeadError:
        return f"{name} is down, and its notes with it"
    except ProtocolError as wrong:
        return f"{name}: {wrong}"
    if found is None:
        return f"{name} runs without a store, and so without notes"
    if not found:
        return f"{name} does not know it: it keeps its last {KEPT_REQUESTS} requests"
    return found
