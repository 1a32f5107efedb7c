"""Stalls of processes on this machine: no report for a while, and no use of the processor."""

from __future__ import annotations

import contextlib
from pathlib import Path


class Pulse:
    """Activity of a process on this machine, judged by the growth of its processor time.

    The time of its descendants counts too: a process that compiles a kernel waits for a compiler.

    Args:
        pid: Process id; None for a process on another machine, whose work is not known.
    """

    def __init__(self, pid: int | None) -> None:
        self._pid = pid
        self._own = self._below = -1
        self._worked_s = 0.0

    @property
    def is_known(self) -> bool:
        return self._pid is not None

    def last_worked_s(self, now_s: float, *, with_descendants: bool = True) -> float:
        """Return when the process was last seen to work, on the caller's clock; 0 for never.

        Args:
            with_descendants: False to read one file instead of one for each thread.
        """
        own = -1 if self._pid is None else _ticks(self._pid)
        if self._pid is None or own < 0:
            return self._worked_s
        below = _ticks_below(self._pid) if with_descendants else self._below
        if own > self._own >= 0 or below != self._below >= 0:
            self._worked_s = now_s
        self._own, self._below = own, below
        return self._worked_s


def _ticks(pid: int) -> int:
    """Return the processor time of a process and its ended children, in clock ticks.

    Returns:
        -1 if there is no such process.
    """
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return -1
    return sum(map(int, fields[11:15]))


def _ticks_below(pid: int) -> int:
    """Return the processor time of a process's live descendants; it changes while they work."""
    total = 0
    for listed in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):  # a thread or a process has ended meanwhile
            for child in map(int, listed.read_text().split()):
                total += max(0, _ticks(child)) + _ticks_below(child)
    return total


class StallWatch:
    """Detector of stalls in a process that reports periodically, and in its successors.

    Args:
        stall_s: Maximum silence of a process that certainly does nothing, in seconds.
        spin_s: Maximum silence of any process, in seconds.
        counts_work: True if processor time of the process or of its descendants, such as
            compilers, counts as work: a step of a large model on a CPU takes minutes. On a GPU it
            proves nothing: a processor that waits for a GPU may be busy or idle.
    """

    def __init__(self, stall_s: float, spin_s: float, *, counts_work: bool) -> None:
        self._stall_s = stall_s
        self._spin_s = spin_s
        self._counts_work = counts_work
        self._pid = 0
        self._seen_s = 0.0
        self._pulse = Pulse(None)

    def has_stalled(self, pid: int, heard_s: float, now_s: float) -> bool:
        """Return whether process ``pid``, whose last report came at ``heard_s``, has stalled.

        Both times are on the caller's clock; the caller must call at least twice in ``stall_s``.
        """
        idle_s = self._idle_s(pid, heard_s, now_s)
        if not pid:
            return False
        return idle_s > self._stall_s or now_s - heard_s > self._spin_s

    def has_stalled_starting(self, pid: int, now_s: float) -> bool:
        """Return whether the starting process ``pid`` has done nothing since it was first seen."""
        idle_s = self._idle_s(pid, 0.0, now_s)
        return bool(pid) and min(idle_s, now_s - self._seen_s) > self._stall_s

    def _idle_s(self, pid: int, heard_s: float, now_s: float) -> float:
        """Return the time without reports and processor use, in seconds; 0 if not known."""
        if pid != self._pid:
            self._pid, self._seen_s = pid, now_s
            self._pulse = Pulse(pid if self._counts_work else None)
        if not self._counts_work:
            return 0.0
        idle_s = now_s - max(heard_s, self._pulse.last_worked_s(now_s, with_descendants=False))
        if idle_s > self._stall_s / 2:
            idle_s = now_s - max(heard_s, self._pulse.last_worked_s(now_s))
        return idle_s
