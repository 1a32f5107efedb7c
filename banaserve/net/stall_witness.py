"""Place in the code at which a thread stands while its event loop does not tick."""

from __future__ import annotations

import sys
import threading
from types import FrameType

from banaserve.net.loop_watch import LEAST_STALL_S

_MOST_FRAMES = 6


class StallWitness:
    """Looks at one thread from another: who asks after a stall asks too late.

    A place is not seen where C code keeps the interpreter's lock for the whole of the stall.

    Args:
        interval_s: Time without a tick after which the thread is looked at, twice that at most.
    """

    def __init__(self, interval_s: float = LEAST_STALL_S / 2) -> None:
        self._interval_s = interval_s
        self._thread_id = threading.get_ident()
        self._num_ticks = 0
        self._where = ""
        self._ended = threading.Event()
        threading.Thread(target=self._run, name="stall-witness", daemon=True).start()

    def tick(self) -> str:
        """Note a tick of the thread that has made this; returns where it stood before, if seen."""
        self._num_ticks += 1
        where, self._where = self._where, ""
        return where

    def close(self) -> None:
        """Look no more."""
        self._ended.set()

    def _run(self) -> None:
        seen = -1
        while not self._ended.wait(self._interval_s):
            if seen == self._num_ticks and not self._where:
                self._where = _place(sys._current_frames().get(self._thread_id))
            seen = self._num_ticks


def _place(frame: FrameType | None) -> str:
    """The innermost calls, the outer ones first."""
    calls: list[str] = []
    while frame is not None and len(calls) < _MOST_FRAMES:
        name = frame.f_code.co_filename.rpartition("/")[2]
        calls.insert(0, f"{name}:{frame.f_lineno} {frame.f_code.co_name}")
        frame = frame.f_back
    return " > ".join(calls)
