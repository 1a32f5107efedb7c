"""Errors of fitted step times on probes that were not fitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from banaserve.orchestrator.control.costs.profile import ErrorSection, Profile
from banaserve.sim.cluster.cluster import SimCluster
from banaserve.sim.request import SimRequest
from banaserve.sim.system import preset
from banaserve_bench.plan.probe.fit import StepFit
from banaserve_bench.plan.probe.measuring import MixedRequest, ProbeSamples
from banaserve_bench.plan.probe.schedule import ProbeLimits
from banaserve_bench.simulation.run import tallied

_LEAST_ERROR = 1e-4
"""Least error that a profile can state."""


class HeldOutErrors(NamedTuple):
    """Relative errors of one figure, without sign, one for each probe that was not fitted.

    Attributes:
        kind: Kind of the probes: ``prefill``, ``decode`` or ``mixed``.
        figure: ``ttft``, ``tpot`` or ``latency``.
    """

    kind: str
    figure: str
    errors: Sequence[float]

    @property
    def mean(self) -> float:
        return sum(self.errors) / len(self.errors)

    @property
    def worst(self) -> float:
        return max(self.errors)


def held_out_errors(
    samples: ProbeSamples, fit: StepFit, profile: Profile, limits: ProbeLimits
) -> list[HeldOutErrors]:
    """Return the errors of held-out probes.

    Those of mixed requests are of the simulator's figures for the same requests.
    """
    return [
        HeldOutErrors("prefill", "ttft", fit.errors_of(samples.prompt_steps(limits, fitted=False))),
        HeldOutErrors("decode", "tpot", fit.errors_of(samples.batch_steps(fitted=False))),
        *_mixed_errors(samples.mixed(), profile, limits),
    ]


def stated_error(found: Sequence[HeldOutErrors]) -> ErrorSection:
    """Return the error that a profile states: for each figure the largest mean of a kind."""
    largest = {
        figure: max(_LEAST_ERROR, *(one.mean for one in found if one.figure == figure))
        for figure in ("ttft", "tpot", "latency")
    }
    return ErrorSection(**largest)


def _mixed_errors(
    real: Sequence[MixedRequest], profile: Profile, limits: ProbeLimits
) -> list[HeldOutErrors]:
    own = _simulated(real, profile, limits)
    pairs = list(zip(own, real, strict=True))
    return [
        HeldOutErrors("mixed", "ttft", [_error(a.ttft_s, b.ttft_s) for a, b in pairs]),
        HeldOutErrors("mixed", "tpot", [_error(a.tpot_s, b.tpot_s) for a, b in pairs]),
        HeldOutErrors("mixed", "latency", [_error(a.latency_s, b.latency_s) for a, b in pairs]),
    ]


def _error(own: float, real: float) -> float:
    return abs(own - real) / real


def _simulated(
    real: Sequence[MixedRequest], profile: Profile, limits: ProbeLimits
) -> list[MixedRequest]:
    """Return the same requests as one simulated engine serves them."""
    asked = [
        SimRequest(n, one.at_s, one.prompt_tokens, one.output_tokens) for n, one in enumerate(real)
    ]
    system = preset(
        "colocated", colocated=1, cache="none", limits={"step_tokens": limits.step_tokens}
    )
    clusters: list[SimCluster] = []
    tallied(profile, system, asked, watch=clusters.append)
    return [
        MixedRequest(
            one.arrival_s,
            one.prompt_tokens,
            one.output_tokens,
            one.first_s - one.arrival_s,
            (one.end_s - one.first_s) / max(1, one.output_tokens - 1),
            one.end_s - one.arrival_s,
        )
        for one in sorted(clusters[0].finished, key=lambda one: one.id)
    ]
