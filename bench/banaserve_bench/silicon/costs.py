"""Measured step times behind the interface of a profile's linear ones."""

from __future__ import annotations

from dataclasses import dataclass

from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.orchestrator.control.costs.steps import StepCosts
from banaserve_bench.silicon.attention import Contexts
from banaserve_bench.silicon.step_times import GpuStepTimes

_SLOPE_STEPS = 16
"""Number of decode steps over which the growth of a run of such steps is taken."""


@dataclass(frozen=True, slots=True)
class EngineConstants:
    """Properties of an engine that its operators do not show; fitted on runs.

    Attributes:
        host_s: CPU time of a step that the GPU waits for, in seconds.
        host_request_s: Increase of ``host_s`` with each decoding request, in seconds.
        decode_factor: Factor of the GPU's time of steps that only decode.
        prompt_factor: Factor of the GPU's time of steps with prompt tokens.
        steps_in_flight: Number of steps that are planned or run at once: 2 with vLLM's
            ``async_scheduling``, else 1.
        launch_s: Minimum of the GPU's time of a step with prompt tokens, in seconds: such a step is
            no single CUDA graph, and the CPU launches its kernels one after the other.
    """

    host_s: float = 0.0
    host_request_s: float = 0.0
    decode_factor: float = 1.0
    prompt_factor: float = 1.0
    steps_in_flight: int = 2
    launch_s: float = 0.0


class MeasuredCosts(StepCosts):
    """Step times of one engine from measured operators.

    ``coefficients`` remain those of the profile, since policies that learn need linear ones.

    Args:
        contexts: Contexts of the requests that decode in the engine; None if they count as equal.
    """

    __slots__ = ("_constants", "_contexts", "_least_s", "_times")

    def __init__(
        self,
        profile: Profile,
        times: GpuStepTimes,
        constants: EngineConstants | None = None,
        contexts: Contexts | None = None,
    ) -> None:
        super().__init__(profile)
        self._contexts = contexts
        self._times, self._constants = times, constants or EngineConstants()
        self._least_s = (times.step_s(0, 0, 1, 1), times.step_s(1, 1, 0, 0))

    def mixed_s(self, tokens: int, pairs: int, batch: int, context: int) -> tuple[float, float]:
        """Return the time of one step and the part of it that grows with its work.

        The part that does not grow is the time of a step with one token, or with one request.
        """
        known = self._constants
        gpu_s = self._times.step_s(tokens, pairs, batch, context, self._contexts)
        of_gpu = known.prompt_factor if tokens else known.decode_factor
        launch_s = known.launch_s if tokens else 0.0
        of_requests_s = batch * known.host_request_s
        step_s = max(of_gpu * gpu_s, launch_s) + known.host_s + of_requests_s
        least_s = max(of_gpu * self._least_s[tokens > 0], launch_s)
        work_s = max(0.0, of_gpu * gpu_s - least_s) + of_requests_s
        return self.factor * step_s + self.hop_s, self.factor * work_s

    def decode_run(self, batch: int, context: int) -> tuple[float, float, float]:
        """Return the first step's time, the increase per later step, and the first step's work."""
        first_s, work_s = self.mixed_s(0, 0, batch, context)
        later_s, _ = self.mixed_s(0, 0, batch, context + _SLOPE_STEPS * batch)
        return first_s, max(0.0, later_s - first_s) / _SLOPE_STEPS, work_s
