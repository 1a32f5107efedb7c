"""Noticing an engine that runs no more steps, though its process is there."""

from __future__ import annotations

from banaserve.processes import Pulse


class StallWatch:
    """Looks at one instance, again and again.

    Args:
        stall_s: How long an engine may be silent.
        counts_work: A process that uses its processor is taken to compute: a step of a large model
            on a CPU takes minutes. On a GPU the processor is busy while it waits for the device.
    """

    def __init__(self, stall_s: float, *, counts_work: bool) -> None:
        self._stall_s = stall_s
        self._counts_work = counts_work
        self._pid = 0
        self._pulse = Pulse(None)

    def has_stalled(self, pid: int, heard_s: float, now_s: float) -> bool:
        """Whether process ``pid``, last heard of at ``heard_s``, does nothing any more.

        Both times are on the caller's clock; it looks at least twice within ``stall_s``.
        """
        if pid != self._pid:
            self._pid, self._pulse = pid, Pulse(pid if self._counts_work else None)
        worked_s = self._pulse.last_worked_s(now_s)
        return bool(pid) and now_s - max(heard_s, worked_s) > self._stall_s
