"""Question of a plan: the load, the instances that may serve it, and the limits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from banaserve.sim.result import LatencyLimits
from banaserve_bench.plan.search.candidates import (
    USUAL_STEP_TOKENS,
    Candidate,
    InstanceShape,
    fixed_candidates,
)
from banaserve_bench.plan.search.loads import PlanLoads, Rows
from banaserve_bench.plan.search.trial import Device, Scenario, StepError, scenarios


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanQuestion:
    """Load, device and limits that are planned for.

    Attributes:
        profile_name: Name or file of the device's profile, which the elastic policy forecasts with;
            empty if there is no such file: instances then learn their step times.
        device: Instance of the fewest GPUs.
        error: Error of step times; None if it is unknown.
        instances: Number of instances of ``device`` in every candidate.
        more_devices: Instances of more GPUs, of which a candidate has fewer.
        has_elastic: True if instances that follow the load are a candidate.
        max_step_tokens: Largest step size of a candidate.
    """

    device: Device
    profile_name: str
    error: StepError | None
    limits: LatencyLimits
    loads: PlanLoads
    instances: int
    has_elastic: bool = False
    max_step_tokens: int = USUAL_STEP_TOKENS
    more_devices: Sequence[Device] = ()

    @property
    def scenarios(self) -> tuple[Scenario, Scenario, Scenario]:
        return scenarios(self.limits, self.error or StepError(0.0, 0.0))

    @property
    def has_prefixes(self) -> bool:
        """True if requests of the loads share known prefixes."""
        return any(row.hash_ids for row in self.loads.first)

    def fixed_candidates(self) -> list[Candidate]:
        """Return the candidates whose roles stay as they are, by numbers of GPUs."""
        return [
            one
            for device in self.devices
            for one in fixed_candidates(
                self.num_gpus // device.gpus,
                self.has_prefixes,
                self.max_step_tokens,
                self.shape(device),
            )
        ]

    @property
    def devices(self) -> tuple[Device, ...]:
        return (self.device, *self.more_devices)

    @property
    def num_gpus(self) -> int:
        """Number of GPUs of every candidate; of instances, where their GPUs are not known."""
        return self.instances * self.device.gpus

    def shape(self, device: Device) -> InstanceShape:
        """Return what candidates of these instances have in common."""
        model, kv_tokens = device.profile.model, device.profile.memory.kv_tokens
        return InstanceShape(
            device.gpus,
            model.token_bytes * device.gpus,
            bool(self.more_devices),
            kv_tokens >= model.max_context_tokens,
        )

    def device_of(self, candidate: Candidate) -> Device:
        return next(one for one in self.devices if one.gpus == candidate.gpus)

    def run(self, candidate: Candidate, rows: Rows, scenario: Scenario) -> dict[str, Any]:
        return self.device_of(candidate).run(candidate, rows, scenario)
