"""The timeline of a modelled device: one step after the other, each for its modelled time."""

from __future__ import annotations


class Device:
    """Knows when each step should end. All times are seconds of one monotonic clock.

    A step begins when the one before it has ended, or when the engine got something to do,
    whatever came later: what the engine's own code takes in between is part of the step, as it is
    in step times that were measured from outside.

    Attributes:
        free_s: When the step under way began, or when the next one may begin.
    """

    def __init__(self, now_s: float) -> None:
        self.free_s = now_s
        self._step_s = 0.0

    def woke(self, now_s: float) -> None:
        """There was nothing to compute until now."""
        self.free_s = max(self.free_s, now_s)

    def begin(self, step_s: float) -> None:
        """A step of ``step_s`` seconds is under way."""
        self._step_s = step_s

    @property
    def deadline_s(self) -> float:
        """When the step under way should end."""
        return self.free_s + self._step_s

    def end(self, worked_s: float) -> bool:
        """The step under way has ended; returns whether it overran.

        One that overran delays those behind it. One whose output was merely let go late, since
        the process woke late, does not.

        Args:
            worked_s: When its real work was done.
        """
        overran = worked_s > self.deadline_s
        self.free_s = max(worked_s, self.deadline_s)
        self._step_s = 0.0
        return overran
