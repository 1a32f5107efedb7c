"""Collection of the notes that all processes have of requests, into traces."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from banaserve.base.clock import Clock
from banaserve.base.errors import ProtocolError
from banaserve.base.types import InstanceId
from banaserve.contracts.rpc.engine_api import CoreApi
from banaserve.contracts.rpc.typed_rpc import call
from banaserve.contracts.trace_events import (
    KEPT_REQUESTS,
    EngineAnswer,
    EngineNotes,
    MoveCommitted,
    RequestTrace,
    TraceLine,
)
from banaserve.engine.compat import engine as compat
from banaserve.serving.instances.instance import Instance
from banaserve.serving.tracing.request_log import RequestNotes, TracedLeg
from banaserve.serving.tracing.spans import FRONT_DOOR, spans_of

_ANSWER_S = 10.0
"""Maximum wait for an engine's answer, in seconds.

An engine answers between two steps, and a step with a long prompt takes long.
"""


_Answer = dict[str, list[EngineNotes]] | str
"""An engine's notes by the names of legs, or the reason why there are none."""


@dataclass(frozen=True, slots=True)
class TraceCollector:
    """Collector of the engines' notes of requests.

    Attributes:
        clock: Clock of the front door's notes.
        moves: Function that returns the last committed moves, each with the time at which its host
            continued.
    """

    instances: Mapping[InstanceId, Instance]
    clock: Clock
    moves: Callable[[], Iterable[tuple[float, MoveCommitted]]] = tuple

    async def trace_of(self, notes: RequestNotes) -> RequestTrace:
        """Return the request's trace; see ``traces_of``."""
        (found,) = await self.traces_of([notes])
        return found

    async def traces_of(self, requests: Sequence[RequestNotes]) -> list[RequestTrace]:
        """Return a trace for each request; ask the engines that ran them, all concurrently.

        Each engine is asked once. An engine that does not answer is named in ``missing``, and no
        exception is raised for it.
        """
        names: dict[tuple[str, int], dict[str, None]] = {}
        for notes in requests:
            for leg in notes.legs:
                names.setdefault(leg.life, {})[leg.name] = None
        answers = await asyncio.gather(*(self._ask(*life, list(of)) for life, of in names.items()))
        known = dict(zip(names, answers, strict=True))
        moves = list(self.moves())
        return [self._trace(notes, known, moves) for notes in requests]

    def _trace(
        self,
        notes: RequestNotes,
        known: Mapping[tuple[str, int], _Answer],
        moves: Iterable[tuple[float, MoveCommitted]],
    ) -> RequestTrace:
        arrived_s = notes.arrived_s
        lines = notes.events()
        missing = _dropped(FRONT_DOOR, notes.num_dropped)
        for leg in dict.fromkeys(notes.legs):
            answer = _of_leg(leg, known[leg.life])
            if isinstance(answer, str):
                missing.append(answer)
                continue
            for found in answer:
                lines += [
                    TraceLine(at_s - arrived_s, leg.instance, event, leg.name)
                    for at_s, event in found.events
                ]
                missing += _dropped(leg.instance, found.num_dropped)
        summary = notes.summary()
        lines += [
            TraceLine(at_s - arrived_s, FRONT_DOOR, move)
            for at_s, move in moves
            if 0.0 <= at_s - arrived_s <= summary.took_s
            and any(leg.instance == move.instance for leg in notes.legs)
        ]
        lines.sort(key=lambda line: line.at_s)
        missing = list(dict.fromkeys(missing))
        return RequestTrace(summary, lines, missing, spans_of(summary, lines))

    async def _ask(self, name: str, incarnation: int, names: list[str]) -> _Answer:
        """Ask an incarnation of an instance for its notes of legs."""
        instance = self.instances.get(InstanceId(name))
        if instance is None:
            return f"{name} has been removed, and its notes with it"
        if instance.llm is None:
            return f"{name} is down, and its notes with it"
        if instance.incarnation != incarnation:
            return f"{name} was started again since, and its notes are lost"
        began_s = self.clock.now()
        try:
            async with asyncio.timeout(_ANSWER_S):
                asked = call(CoreApi.banaserve_notes, names)
                reply = await compat.call_utility(instance.llm, asked.name, *asked.args)
                answer = asked.read(reply)
        except TimeoutError:
            return f"{name} has not answered in {_ANSWER_S:.0f} s"
        except compat.EngineDeadError:
            return f"{name} is down, and its notes with it"
        except ProtocolError as wrong:
            return f"{name}: {wrong}"
        if answer is None:
            return f"{name} runs without a store, and so without notes"
        return dict(zip(names, _on_our_clock(answer, began_s, self.clock.now()), strict=True))


def _of_leg(leg: TracedLeg, answer: _Answer) -> list[EngineNotes] | str:
    if isinstance(answer, str):
        return answer
    if not answer[leg.name]:
        return f"{leg.instance} does not know it: it keeps its last {KEPT_REQUESTS} requests"
    return answer[leg.name]


def _on_our_clock(
    answer: EngineAnswer, asked_s: float, answered_s: float
) -> list[list[EngineNotes]]:
    """Return the notes with times converted to this machine's clock.

    An engine on another machine has another clock. The engine is taken to have read its clock
    halfway between question and answer, so times are off by at most half of the round trip.
    """
    if asked_s <= answer.now_s <= answered_s:
        return answer.found
    ahead_s = answer.now_s - (asked_s + answered_s) / 2
    for of_name in answer.found:
        for notes in of_name:
            notes.events = [(at_s - ahead_s, event) for at_s, event in notes.events]
    return answer.found


def _dropped(process: str, num_dropped: int) -> list[str]:
    return [f"{num_dropped} later events of {process} were not kept"] if num_dropped else []
