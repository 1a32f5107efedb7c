"""Place in the code that a thread executes while its event loop does not tick."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from banaserve.base.net.loop_watch import LEAST_STALL_S

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
