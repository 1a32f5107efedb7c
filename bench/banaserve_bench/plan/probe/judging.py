"""Errors of fitted step times on probes that were not fitted."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from banaserve.orchestrator.control.costs.profile import ErrorSection, Profile
from banaserve.sim.cluster.cluster import SimCluster
from banaserve.sim.request import SimRequest
from banaserve.sim.system import preset
from banaserve_bench.loadgen.client import RequestRecord
from banaserve_bench.plan.probe.fit import StepFit
from banaserve_bench.plan.probe.measuring import ProbeSamples
from banaserve_bench.plan.probe.schedule import ProbeLimits
from banaserve_bench.serving.summary import output_tokens, tpot_s
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
        """Mean error."""
        return sum(self.errors) / len(self.errors)

    @property
    def worst(self) -> float:
        """Largest error."""
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
        *_mixed_errors(samples.loads, profile, limits),
    ]


def stated_error(found: Sequence[HeldOutErrors]) -> ErrorSection:
    """Return the error that a profile states: for each figure the largest mean of a kind."""
    largest = {
        figure: max(_LEAST_ERROR, *(one.mean for one in found if one.figure == figure))
        for figure in ("ttft", "tpot", "latency")
    }
    return ErrorSection(**largest)


def _mixed_errors(
    loads: Sequence[Sequence[RequestRecord]], profile: Profile, limits: ProbeLimits
) -> list[HeldOutErrors]:
    errors: dict[str, list[float]] = {"ttft": [], "tpot": [], "latency": []}
    for records in loads:
        simulated = _simulated(records, profile, limits)
        for own, real in zip(simulated, map(_figures, records), strict=True):
            for figure, value in own.items():
                errors[figure].append(abs(value - real[figure]) / real[figure])
    return [HeldOutErrors("mixed", figure, of) for figure, of in errors.items()]


def _figures(record: RequestRecord) -> dict[str, float]:
    return {
        "ttft": record.ttft_s or 0.0,
        "tpot": tpot_s(record) or 0.0,
        "latency": record.token_at_s[-1] - record.sent_at_s,
    }


def _simulated(
    records: Sequence[RequestRecord], profile: Profile, limits: ProbeLimits
) -> list[dict[str, float]]:
    """Return the figures of the same requests on one simulated engine, in the same order."""
    start_s = records[0].sent_at_s
    asked = [
        SimRequest(n, one.sent_at_s - start_s, one.prompt_tokens or 1, output_tokens(one))
        for n, one in enumerate(records)
    ]
    system = preset(
        "colocated", colocated=1, cache="none", limits={"step_tokens": limits.step_tokens}
    )
    clusters: list[SimCluster] = []
    tallied(profile, system, asked, watch=clusters.append)
    return [
        {
            "ttft": one.first_s - one.arrival_s,
            "tpot": (one.end_s - one.first_s) / max(1, one.output_tokens - 1),
            "latency": one.end_s - one.arrival_s,
        }
        for one in sorted(clusters[0].finished, key=lambda one: one.id)
    ]
