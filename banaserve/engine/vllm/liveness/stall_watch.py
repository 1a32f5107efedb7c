"""An engine that runs no steps though its process lives."""

from __future__ import annotations

from banaserve.processes import Pulse


class StallWatch:
    """Watches one instance until it ends.

    Args:
        stall_s: How long an engine may be silent that does nothing for certain.
        spin_s: How long any engine may be silent.
        counts_work: A process that uses its processor is taken to compute: a step of a large model
            on a CPU takes minutes. On a GPU the processor is busy while it waits for the device, and
            idle while the device computes: nothing is certain there.
    """

    def __init__(self, stall_s: float, spin_s: float, *, counts_work: bool) -> None:
        self._stall_s = stall_s
        self._spin_s = spin_s
        self._counts_work = counts_work
        self._pid = 0
        self._seen_s = 0.0
        self._pulse = Pulse(None)

    def has_stalled(self, pid: int, heard_s: float, now_s: float) -> bool:
        """Whether process ``pid``, last heard of at ``heard_s``, gets no further.

        Both times are on the caller's clock; it looks at least twice within ``stall_s``.
        """
        idle_s = self._idle_s(pid, heard_s, now_s)
        if not pid:
            return False
        return idle_s > self._stall_s or now_s - heard_s > self._spin_s

    def has_stalled_starting(self, pid: int, now_s: float) -> bool:
        """Whether process ``pid``, which is starting, has done nothing since it was first seen."""
        idle_s = self._idle_s(pid, 0.0, now_s)
        return bool(pid) and min(idle_s, now_s - self._seen_s) > self._stall_s

    def _idle_s(self, pid: int, heard_s: float, now_s: float) -> float:
        """For how long it has been silent and used no processor; 0 where that is not known."""
        if pid != self._pid:
            self._pid, self._seen_s = pid, now_s
            self._pulse = Pulse(pid if self._counts_work else None)
        if not self._counts_work:
            return 0.0
        return now_s - max(heard_s, self._pulse.last_worked_s(now_s))
