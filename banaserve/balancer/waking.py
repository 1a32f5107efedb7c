"""When the requests of the line are asked about."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from banaserve.balancer.line import Line
from banaserve.orchestrator.replicas.fleet import Fleet


class Waker:
    """Looks through the line soon after something may have become free."""

    def __init__(self, line: Line, fleet: Fleet) -> None:
        self._line, self._fleet = line, fleet
        self._is_awake = self._goes_on = False

    def wake(self) -> None:
        """Look through the line soon; once, however often this is called."""
        if self._line and not self._is_awake:
            self._is_awake = True
            asyncio.get_running_loop().call_soon(self._begin)

    def _begin(self) -> None:
        self._is_awake = False
        self._ask(self._line.wake)

    def _go_on(self) -> None:
        self._goes_on = False
        self._ask(self._line.go_on)

    def _ask(self, ask: Callable[[], bool]) -> None:
        # The one that is asked about does not count.
        self._fleet.queue_length = max(0, len(self._line) - 1)
        is_more = ask()
        self._fleet.queue_length = len(self._line)
        if is_more and not self._goes_on:
            self._goes_on = True
            asyncio.get_running_loop().call_soon(self._go_on)
