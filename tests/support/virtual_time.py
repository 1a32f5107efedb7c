"""Asyncio in the virtual time of a simulator's timeline."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from contextvars import Context
from typing import Any, TypeVar

from banaserve.sim.timeline import Timeline

T = TypeVar("T")


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
