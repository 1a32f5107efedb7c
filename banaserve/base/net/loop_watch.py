"""Stalls of an event loop: calls that come too late, and the code that runs meanwhile."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections.abc import Collection
from types import FrameType
from typing import Any

LEAST_STALL_S = 1.0
"""Lateness from which a call counts as a stall, in seconds; a busy machine may delay any call by
less."""


class LoopWatch:
    """Detector of an event loop's stalls, for a periodic caller.

    After a stall, the data that peers have sent meanwhile has not been read yet: the peers' time
    limits must not be enforced before the loop has read it.

    Args:
        interval_s: Time between two calls of ``tick``, in seconds.

    Attributes:
        lag_s: Time by which the last tick came too late, in seconds.
    """

    def __init__(self, interval_s: float) -> None:
        self._interval_s = interval_s
        self._ticked_s: float | None = None
        self._has_stood_still = self._has_waited = False
        self.lag_s = 0.0

    def tick(self, now_s: float) -> bool:
        """Record a tick; return whether the loop has stood still since the previous tick."""
        due_s = now_s if self._ticked_s is None else self._ticked_s + self._interval_s
        self._ticked_s, self.lag_s = now_s, max(0.0, now_s - due_s)
        is_stall = self.lag_s >= LEAST_STALL_S
        self._has_stood_still = self._has_stood_still or is_stall
        return is_stall

    def may_enforce(self) -> bool:
        """Return whether time limits of peers may be enforced now.

        False once after a stall, but never twice in a row: with a loop that stalls repeatedly,
        time limits must still be enforced.
        """
        may = not self._has_stood_still or self._has_waited
        self._has_stood_still, self._has_waited = False, not may
        return may


async def wait_first(awaited: Collection[asyncio.Future[Any]], timeout_s: float) -> None:
    """Return when one of ``awaited`` is done, or after ``timeout_s`` seconds.

    After a stall, a loop runs timers before it reads the answers that have come meanwhile. A late
    timeout is therefore extended by its lateness, at most by ``timeout_s``.
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


_MOST_FRAMES = 6


class StallWitness:
    """Observer of one thread from another, which sees the place of a stall while the stall lasts.

    The place is not seen if C code holds the interpreter's lock during the whole stall.

    Args:
        interval_s: Time without a tick after which the thread's place is recorded, in seconds; it
            may take up to twice as long.
    """

    def __init__(self, interval_s: float = LEAST_STALL_S / 2) -> None:
        self._interval_s = interval_s
        self._thread_id = threading.get_ident()
        self._num_ticks = 0
        self._where = ""
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="stall-witness", daemon=True).start()

    def tick(self) -> str:
        """Record a tick of the observed thread; return its place in the stall before, if seen."""
        self._num_ticks += 1
        where, self._where = self._where, ""
        return where

    def close(self) -> None:
        """Stop observing."""
        self._ended.set()

    def _run(self) -> None:
        seen = -1
        while not self._ended.wait(self._interval_s):
            if seen == self._num_ticks and not self._where:
                self._where = _place(sys._current_frames().get(self._thread_id))
            seen = self._num_ticks


def _place(frame: FrameType | None) -> str:
    """Return the innermost calls of a stack, outermost first."""
    calls: list[str] = []
    while frame is not None and len(calls) < _MOST_FRAMES:
        name = frame.f_code.co_filename.rpartition("/")[2]
        calls.insert(0, f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " > ".join(calls)
