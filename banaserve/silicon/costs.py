"""Measured step times behind the interface of a profile's linear ones."""

from __future__ import annotations

from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.orchestrator.control.costs.steps import StepCosts
from banaserve.silicon.step_times import GpuStepTimes

_SLOPE_STEPS = 16
"""Number of decode steps over which the growth of a run of such steps is taken."""


class MeasuredCosts(StepCosts):
    """Step times of one engine from measured operators.

    ``coefficients`` remain those of the profile, since policies that learn need linear ones.

    Args:
        host_s: CPU time between two steps that the GPU waits for, in seconds.
    """

    __slots__ = ("_host_s", "_times")

    def __init__(self, profile: Profile, times: GpuStepTimes, host_s: float = 0.0) -> None:
        super().__init__(profile)
        self._times, self._host_s = times, host_s

    def mixed_s(self, tokens: int, pairs: int, batch: int, context: int) -> tuple[float, float]:
        """Return the time of one step and the part of it that grows with its work.

        The part that does not grow is the time of a step with one token, or with one request.
        """
        gpu_s = self._times.step_s(tokens, pairs, batch, context)
        least_s = self._times.step_s(1, 1, 0, 0) if tokens else self._times.step_s(0, 0, 1, 1)
        factor = self.factor
        return factor * (gpu_s + self._host_s) + self.hop_s, factor * max(0.0, gpu_s - least_s)

    def decode_run(self, batch: int, context: int) -> tuple[float, float, float]:
        """Return the first step's time, the increase per later step, and the first step's work."""
        first_s, work_s = self.mixed_s(0, 0, batch, context)
        later_s, _ = self.mixed_s(0, 0, batch, context + _SLOPE_STEPS * batch)
        return first_s, max(0.0, later_s - first_s) / _SLOPE_STEPS, work_s
