"""Notes of the connector's scheduler side about its last requests, for ``banaserve trace``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

import msgspec

from banaserve.base.clock import Clock
from banaserve.contracts.trace_events import (
    KEPT_REQUESTS,
    MAX_EVENTS,
    CopiesEnded,
    EngineAnswer,
    EngineEvent,
    EngineFinished,
    EngineNotes,
    EngineReceived,
    StepsPlanned,
)
from banaserve.engine.connector.metadata import StepResult

_KEPT_STEPS = 64
"""Number of planned steps kept until the worker answers; there are never more under way."""


class _Record:
    """Events of one request.

    Attributes:
        steps: Steps of the present phase, each of which continues where the previous one ended.
    """

    def __init__(self, request_id: str, prompt_tokens: int) -> None:
        self.request_id = request_id
        self.steps: StepsPlanned | None = None
        self._prompt_tokens = prompt_tokens
        self._events: list[tuple[float, EngineEvent]] = []
        self._num_dropped = 0
        self._began_s = self._last_s = 0.0
        self._last_before = 0

    def add(self, at_s: float, event: EngineEvent) -> None:
        if len(self._events) < MAX_EVENTS:
            self._events.append((at_s, event))
        else:
            self._num_dropped += 1

    def planned(self, step: int, now_s: float, num_before: int, num_tokens: int) -> None:
        """Add a step to the notes. Runs for each request of each step: it must stay cheap."""
        steps = self.steps
        phase = "prompt" if num_before < self._prompt_tokens else "decode"
        # After a preemption or a failed fetch vLLM computes tokens again.
        if steps is None or steps.phase != phase or num_before <= self._last_before:
            steps = self.steps = StepsPlanned(phase, step, step)
            self.add(now_s, steps)
            self._began_s = self._last_s = now_s
        steps.longest_gap_s = max(steps.longest_gap_s, now_s - self._last_s)
        steps.took_s = now_s - self._began_s
        steps.last_step = step
        steps.num_steps += 1
        steps.num_tokens += num_tokens
        self._last_before, self._last_s = num_before, now_s

    def notes(self) -> EngineNotes:
        """Return the events so far, of which later steps change nothing."""
        events = [(at_s, msgspec.structs.replace(event)) for at_s, event in self._events]
        return EngineNotes(self.request_id, events, self._num_dropped)


@dataclass(slots=True)
class _Copies:
    """Blocks that one step copies for one request, which may end before the step does."""

    record: _Record
    fetched_blocks: int = 0
    saved_blocks: int = 0


class ConnectorNotes:
    """Notes of the engine's current requests, and of the last ones that ended.

    Used in the scheduler's thread only, which also answers queries.

    Args:
        clock: The machine's monotonic clock, so that notes of several processes have one order.
        kept: Number of ended requests whose notes are kept.
    """

    def __init__(self, clock: Clock, kept: int = KEPT_REQUESTS) -> None:
        self._clock = clock
        self._open: dict[str, _Record] = {}
        self._kept = kept
        self._ended: deque[_Record] = deque()
        self._by_id: dict[str, list[_Record]] = {}
        self._copies: dict[int, dict[str, _Copies]] = {}
        self._saves_of_step: dict[int, int] = {}

    def received(
        self, request_id: str, prompt_tokens: int, leaves_tail: bool, handed_over: int | None
    ) -> None:
        """Begin the notes of a request that the scheduler looks at for the first time."""
        record = self._open[request_id] = _Record(request_id, prompt_tokens)
        self._by_id.setdefault(request_id, []).append(record)
        event = EngineReceived(prompt_tokens, leaves_tail, handed_over)
        record.add(self._clock.now(), event)

    def note(self, request_id: str, event: EngineEvent) -> None:
        if (record := self._open.get(request_id)) is not None:
            record.add(self._clock.now(), event)

    def planned(self, step: int, batch: Iterable[tuple[str, int, int]]) -> None:
        """Note a planned step.

        Args:
            batch: Id and tokens computed before the step and in it, for each request.
        """
        now_s, known = self._clock.now(), self._open
        for request_id, num_before, num_tokens in batch:
            if (record := known.get(request_id)) is not None:
                record.planned(step, now_s, num_before, num_tokens)

    def copies(self, step: int, request_id: str, *, fetched: int = 0, saved: int = 0) -> None:
        """Note the blocks that a step, already given to ``planned``, copies for a request."""
        self._saves_of_step[step] = self._saves_of_step.get(step, 0) + saved
        if len(self._saves_of_step) > _KEPT_STEPS:
            oldest = next(iter(self._saves_of_step))
            del self._saves_of_step[oldest]
            self._copies.pop(oldest, None)
        record = self._open.get(request_id)
        if record is None or record.steps is None:
            return
        record.steps.fetched_blocks += fetched
        record.steps.saved_blocks += saved
        if fetched or record.steps.phase == "prompt":  # for decode's blocks the sum is enough
            copies = self._copies.setdefault(step, {}).setdefault(request_id, _Copies(record))
            copies.fetched_blocks += fetched
            copies.saved_blocks += saved

    def step_done(self, done: StepResult) -> None:
        """Note that the worker has ended a step, whose saved blocks are now readable."""
        planned_saves = self._saves_of_step.pop(done.step, 0)
        now_s = self._clock.now()
        for copies in self._copies.pop(done.step, {}).values():
            event = CopiesEnded(
                done.step,
                copies.fetched_blocks,
                copies.saved_blocks,
                done.fetch_s,
                done.compute_s,
                planned_saves - done.saved_blocks,
                done.save_s,
            )
            copies.record.add(now_s, event)

    def finished(self, request_id: str, output_tokens: int) -> None:
        """End the notes of a request that the scheduler releases; keep them for queries."""
        if (record := self._open.pop(request_id, None)) is not None:
            record.add(self._clock.now(), EngineFinished(output_tokens))
            self._ended.append(record)
            if len(self._ended) > self._kept:
                self._forget(self._ended.popleft())

    def _forget(self, record: _Record) -> None:
        others = [one for one in self._by_id[record.request_id] if one is not record]
        if others:
            self._by_id[record.request_id] = others
        else:
            del self._by_id[record.request_id]

    def of(self, name: str) -> list[EngineNotes]:
        """Return the notes of the request of this id, or of all sequences that vLLM made of it."""
        known = self._by_id.get(name)
        if known is None:
            every = chain(self._ended, self._open.values())
            known = [record for record in every if _is_named(record.request_id, name)]
        return [record.notes() for record in known]

    def answer(self, names: Sequence[str]) -> EngineAnswer:
        """Return the notes of several requests, with the time of this machine's clock."""
        return EngineAnswer(self._clock.now(), [self.of(name) for name in names])


def _is_named(request_id: str, name: str) -> bool:
    """Return whether ``request_id`` belongs to request ``name``: ``INDEX_NAME-RANDOM`` if n > 1."""
    index, _, rest = request_id.partition("_")
    return request_id == name or (index.isdigit() and rest.rpartition("-")[0] == name)
