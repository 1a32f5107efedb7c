"""Virtual time: a heap of events. Time jumps from event to event, without waiting."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from heapq import heappop, heappush
from typing import Any, TypeVar

T = TypeVar("T")

Event = Callable[[Any], None]


class Timeline:
    """Events in the order of their times; equal times in the order in which they were added.

    Attributes:
        now_s: Virtual seconds since the start.
        num_events: Number of events that have happened.
    """

    __slots__ = ("_heap", "_next", "now_s", "num_events")

    def __init__(self) -> None:
        self.now_s = 0.0
        self.num_events = 0
        self._heap: list[tuple[float, int, Event, Any]] = []
        self._next = 0

    def at(self, time_s: float, event: Event, argument: Any = None) -> None:
        """Schedule ``event(argument)`` at ``time_s``, or at once if that time is past."""
        self._next += 1
        if time_s < self.now_s:
            time_s = self.now_s
        heappush(self._heap, (time_s, self._next, event, argument))

    def after(self, delay_s: float, event: Event, argument: Any = None) -> None:
        """Schedule ``event(argument)`` in ``delay_s`` from now."""
        self.at(self.now_s + delay_s, event, argument)

    @property
    def next_s(self) -> float | None:
        """Return the time of the next event, in seconds; None if there is none."""
        return self._heap[0][0] if self._heap else None

    @property
    def num_due(self) -> int:
        """Return the number of scheduled events."""
        return len(self._heap)

    def step(self) -> None:
        """Jump to the next event and run it; there must be one."""
        self.now_s, _, event, argument = heappop(self._heap)
        self.num_events += 1
        event(argument)

    def run(self, until_s: float = float("inf")) -> None:
        """Run all events up to and including ``until_s``."""
        heap, pop = self._heap, heappop
        while heap and heap[0][0] <= until_s:
            self.now_s, _, event, argument = pop(heap)
            self.num_events += 1
            event(argument)
        if until_s != float("inf"):
            self.now_s = max(self.now_s, until_s)


class _JumpingSelector(selectors.DefaultSelector):
    """Selector that runs the timeline where an event loop would wait."""

    def __init__(self, timeline: Timeline) -> None:
        super().__init__()
        self._timeline = timeline
        self.has_woken = False

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        timeline = self._timeline
        ready = super().select(0)
        if ready or (timeout is not None and timeout <= 0):
            return ready
        until_s = float("inf") if timeout is None else timeline.now_s + timeout
        self.has_woken = False
        while not self.has_woken:
            next_s = timeline.next_s
            if next_s is None or next_s > until_s:
                if timeout is None:
                    raise RuntimeError("the simulation waits for something that never happens")
                timeline.now_s = until_s
                break
            timeline.step()
        return ready


class VirtualTimeLoop(asyncio.SelectorEventLoop):
    """Asyncio loop on a timeline: timers and events share one order of time."""

    def __init__(self, timeline: Timeline) -> None:
        self._timeline = timeline
        self._jumping = _JumpingSelector(timeline)
        super().__init__(self._jumping)

    def time(self) -> float:
        return self._timeline.now_s

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., Any], *args: Any, context: Context | None = None
    ) -> asyncio.Handle:
        self._jumping.has_woken = True
        return super().call_soon(callback, *args, context=context)


def run_virtual(timeline: Timeline, main: Coroutine[Any, Any, T]) -> T:
    """Run ``main`` in virtual time and return its result; waiting takes no real time.

    Raises:
        RuntimeError: ``main`` waits for something that no timer and no event will bring about.
    """
    with asyncio.Runner(loop_factory=lambda: VirtualTimeLoop(timeline)) as runner:
        return runner.run(main)
