"""Measured step times for the engines of a simulated cluster."""

from __future__ import annotations

from dataclasses import replace

from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.sim.cluster.cluster import SimCluster
from banaserve_bench.silicon.costs import EngineConstants, MeasuredCosts
from banaserve_bench.silicon.step_times import GpuStepTimes


def install(
    cluster: SimCluster, profile: Profile, times: GpuStepTimes, constants: EngineConstants
) -> None:
    """Give measured step times to all engines of ``cluster``, before anything happens in it."""
    for cell in cluster.cells:
        for instance in cell.instances.values():
            engine = instance.engine
            engine.costs = MeasuredCosts(profile, times, constants, engine.contexts)
            engine.limits = replace(engine.limits, plans_ahead=constants.steps_in_flight > 1)
