"""Stalls of an event loop, noticed by a periodic call that comes too late."""

from __future__ import annotations

import asyncio
from collections.abc import Collection
from typing import Any

LEAST_STALL_S = 1.0
"""A call that is later than this counts as a stall; a busy machine may delay any call by less."""


class LoopWatch:
    """Tells a periodic caller whether the event loop has stood still.

    After a stall, what peers have sent meanwhile has not been read yet: their time limits must not
    be enforced before the loop has read it.

    Args:
        interval_s: Time between two calls of ``tick``.

    Attributes:
        lag_s: Time by which the last tick came too late.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._ticked_s: float | None = None
        self._has_stood_still = self._has_waited = False
        self.lag_s = 0.0

    def tick(self, now_s: float) -> bool:
        """Note a tick; return whether the loop has stood still since the last one."""
        due_s = now_s if self._ticked_s is None else self._ticked_s + self._interval_s
        self._ticked_s, self.lag_s = now_s, max(0.0, now_s - due_s)
        is_stall = self.lag_s >= LEAST_STALL_S
        self._has_stood_still = self._has_stood_still or is_stall
        return is_stall

    def may_enforce(self) -> bool:
        """Return whether time limits of peers may be enforced now.

        False once after a stall, and never twice in a row: a loop that stands still again and again
        must not keep every peer for ever.
        """
        may = not self._has_stood_still or self._has_waited
        self._has_stood_still, self._has_waited = False, not may
        return may


async def wait_first(awaited: Collection[asyncio.Future[Any]], timeout_s: float) -> None:
    """Return when one of ``awaited`` is done, or none is in ``timeout_s``.

    A timer of a loop that has stood still runs before the answers that have come meanwhile are
    read: after a stall these get the time once more by which the timer was late.
    """
    loop = asyncio.get_running_loop()
    due_s = loop.time() + timeout_s
    while True:
        done, _ = await asyncio.wait(
            awaited, timeout=due_s - loop.time(), return_when=asyncio.FIRST_COMPLETED
        )
        late_s = loop.time() - due_s
        if done or late_s < LEAST_STALL_S:
            return
        due_s = loop.time() + min(late_s, timeout_s)
