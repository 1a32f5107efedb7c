"""Virtual time: a heap of events. Time jumps from event to event, without waiting."""

from __future__ import annotations

from collections.abc import Callable
from heapq import heappop, heappush
from typing import Any

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
