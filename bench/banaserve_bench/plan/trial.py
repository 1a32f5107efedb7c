"""Simulation of one candidate under one load, at step times that may be wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from banaserve.orchestrator.control.costs.profile import ErrorSection, Profile
from banaserve.orchestrator.control.costs.steps import StepCosts
from banaserve.sim.cluster.cluster import SimCluster
from banaserve.sim.result import LatencyLimits
from banaserve.sim.trace import Arrival, requests_of
from banaserve_bench.plan.candidates import Candidate
from banaserve_bench.silicon.costs import MeasuredCosts
from banaserve_bench.silicon.description import StepTimesDescription
from banaserve_bench.silicon.install import install
from banaserve_bench.simulation.run import simulate


@dataclass(frozen=True, slots=True)
class StepError:
    """Relative errors of simulated times, without sign.

    Attributes:
        step: Error of all step times.
        ttft: Error of TTFT, which may be larger.
    """

    step: float
    ttft: float

    @classmethod
    def of(cls, error: ErrorSection) -> StepError:
        """Return the larger one of the errors of means and of percentiles."""
        step = [error.tpot, error.tpot_p99, error.latency]
        return cls(_largest(step), _largest([error.ttft, error.ttft_p99]))


class Scenario(NamedTuple):
    """Assumption about step times.

    Attributes:
        factor: Factor of all step times.
        limits: Limits by which requests are judged, in simulated time.
    """

    factor: float
    limits: LatencyLimits


def scenarios(limits: LatencyLimits, error: StepError) -> tuple[Scenario, Scenario, Scenario]:
    """Return step times longer by ``error``, as predicted, and shorter by ``error``.

    An error of TTFT beyond that of step times shortens or lengthens its limit.
    """
    factor = 1 + error.step
    rest = max(1.0, (1 + error.ttft) / factor)
    strict = LatencyLimits(limits.ttft_s / rest, limits.tpot_s)
    lenient = LatencyLimits(limits.ttft_s * rest, limits.tpot_s)
    return Scenario(factor, strict), Scenario(1.0, limits), Scenario(1 / factor, lenient)


class Device(NamedTuple):
    """Modelled device and model: a profile, and measured step times in place of its own."""

    profile: Profile
    measured: StepTimesDescription | None = None

    @property
    def costs(self) -> StepCosts:
        """Return new step times of one engine."""
        if self.measured is None:
            return StepCosts(self.profile)
        return MeasuredCosts(self.profile, self.measured.times, self.measured.constants)

    def run(
        self, candidate: Candidate, rows: Sequence[Arrival], scenario: Scenario
    ) -> dict[str, Any]:
        """Return the result of ``simulate``."""

        def watch(cluster: SimCluster) -> None:
            if self.measured is not None:
                install(cluster, self.profile, self.measured.times, self.measured.constants)
            for cell in cluster.cells:
                for instance in cell.instances.values():
                    instance.engine.costs.slowdown = scenario.factor

        requests = requests_of(rows)
        return simulate(self.profile, candidate.system, requests, scenario.limits, watch=watch)


def _largest(errors: Sequence[float]) -> float:
    return max(one for one in errors if not math.isnan(one))
