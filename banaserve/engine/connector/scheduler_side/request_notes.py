"""Notes of the connector's scheduler side about its last requests, for ``banaserve trace``."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import chain

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


@dataclass(slots=True)
class _Span:
    """Steps of one phase, each of which continues where the previous one ended."""

    in_prompt: bool
    first_step: int
    last_step: int
    num_steps: int
    num_tokens: int
    last_before: int
    began_s: float
    last_s: float
    longest_gap_s: float = 0.0
    fetched_blocks: int = 0
    saved_blocks: int = 0

    def event(self) -> StepsPlanned:
        return StepsPlanned(
            phase="prompt" if self.in_prompt else "decode",
            first_step=self.first_step,
            last_step=self.last_step,
            num_steps=self.num_steps,
            num_tokens=self.num_tokens,
            took_s=self.last_s - self.began_s,
            longest_gap_s=self.longest_gap_s,
            fetched_blocks=self.fetched_blocks,
            saved_blocks=self.saved_blocks,
        )


class _Record:
    """Events of one request."""

    __slots__ = ("events", "num_dropped", "prompt_tokens", "request_id", "span")

    def __init__(self, request_id: str, prompt_tokens: int) -> None:
        self.request_id = request_id
        self.prompt_tokens = prompt_tokens
        self.events: list[tuple[float, EngineEvent | _Span]] = []
        self.num_dropped = 0
        self.span: _Span | None = None

    def add(self, at_s: float, event: EngineEvent | _Span) -> None:
        if len(self.events) < MAX_EVENTS:
            self.events.append((at_s, event))
        else:
            self.num_dropped += 1

    def planned(self, step: int, now_s: float, num_before: int, num_tokens: int) -> None:
        """Add a step to the notes. Runs for each request of each step: it must stay cheap."""
        span = self.span
        in_prompt = num_before < self.prompt_tokens
        # After a preemption or a failed fetch vLLM computes tokens again.
        if span is None or span.in_prompt is not in_prompt or num_before <= span.last_before:
            self.span = _Span(in_prompt, step, step, 1, num_tokens, num_before, now_s, now_s)
            self.add(now_s, self.span)
            return
        gap_s = now_s - span.last_s
        if gap_s > span.longest_gap_s:
            span.longest_gap_s = gap_s
        span.last_step = step
        span.num_steps += 1
        span.num_tokens += num_tokens
        span.last_before = num_before
        span.last_s = now_s

    def notes(self) -> EngineNotes:
        events: list[tuple[float, EngineEvent]] = [
            (at_s, event.event() if isinstance(event, _Span) else event)
            for at_s, event in self.events
        ]
        return EngineNotes(self.request_id, events, self.num_dropped)


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
        if record is None or record.span is None:
            return
        record.span.fetched_blocks += fetched
        record.span.saved_blocks += saved
        if fetched or record.span.in_prompt:  # for decode's blocks the sum is enough
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
