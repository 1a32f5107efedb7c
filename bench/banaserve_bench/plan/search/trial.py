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
from banaserve_bench.plan.search.candidates import Candidate
from banaserve_bench.plan.search.time_parts import PartsWatch, TimeParts
from banaserve_bench.silicon.costs import MeasuredCosts
from banaserve_bench.silicon.description import StepTimesDescription
from banaserve_bench.silicon.install import install
from banaserve_bench.simulation.run import simulate

_LEAST_S = 1e-9
_WITH_WAY = ("ttft_mean_s", "ttft_p50_s", "ttft_p99_s", "e2e_mean_s", "e2e_p99_s")
_OF_MEAN = 1.44
"""75th percentile of normal errors' sizes, over their mean.

Two systems with errors of that size in opposite directions bound the ratio in nine of ten cases;
errors of their mean size did so too rarely for runs on real GPUs (``benchmarks/plan``).
"""


@dataclass(frozen=True, slots=True)
class StepError:
    """Relative errors of simulated times that three of four do not exceed, without sign.

    Attributes:
        step: Error of all step times.
        ttft: Error of TTFT, which may be larger.
    """

    step: float
    ttft: float

    @classmethod
    def of(cls, error: ErrorSection) -> StepError:
        """Return the errors for mean ones: the larger one of those of means and of percentiles."""
        step = [error.tpot, error.tpot_p99, error.latency]
        return cls(_OF_MEAN * _largest(step), _OF_MEAN * _largest([error.ttft, error.ttft_p99]))


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
    """Modelled instance: a profile, and measured step times in place of its own.

    Attributes:
        gpus: Number of GPUs of an instance, which share the model's tensors.
        kind: Name of the GPU; empty if the profile stands for a whole instance.
    """

    profile: Profile
    measured: StepTimesDescription | None = None
    gpus: int = 1
    kind: str = ""

    @property
    def costs(self) -> StepCosts:
        """Return new step times of one engine."""
        if self.measured is None:
            return StepCosts(self.profile)
        return MeasuredCosts(self.profile, self.measured.times, self.measured.constants)

    def run(
        self, candidate: Candidate, rows: Sequence[Arrival], scenario: Scenario
    ) -> dict[str, Any]:
        def watch(cluster: SimCluster) -> None:
            if self.measured is not None:
                install(cluster, self.profile, self.measured.times, self.measured.constants)
            for cell in cluster.cells:
                for instance in cell.instances.values():
                    instance.engine.costs.slowdown = scenario.factor

        way_s = self._way_s(rows)
        limits = LatencyLimits(
            max(_LEAST_S, scenario.limits.ttft_s - way_s), scenario.limits.tpot_s
        )
        found = simulate(self.profile, candidate.system, requests_of(rows), limits, watch=watch)
        return {
            name: way_s + value if name in _WITH_WAY else value for name, value in found.items()
        }

    def time_parts(self, candidate: Candidate, rows: Sequence[Arrival]) -> TimeParts:
        """Return where the time of a request goes, in the mean of ``rows``."""
        clusters: list[SimCluster] = []
        watched = PartsWatch()

        def watch(cluster: SimCluster) -> None:
            clusters.append(cluster)
            if self.measured is not None:
                install(cluster, self.profile, self.measured.times, self.measured.constants)
            watched.watch(cluster)

        simulate(self.profile, candidate.system, requests_of(rows), watch=watch)
        return watched.parts(clusters[0].finished, self._way_s(rows))

    def _way_s(self, rows: Sequence[Arrival]) -> float:
        """Return the time of a request of mean length from its client to the engine."""
        if self.measured is None:
            return 0.0
        tokens = sum(row.prompt_tokens for row in rows) / len(rows)
        return self.measured.way_s + self.measured.way_token_s * tokens


def _largest(errors: Sequence[float]) -> float:
    return max(one for one in errors if not math.isnan(one))
