"""Measured step times for the engines of a simulated cluster."""

from __future__ import annotations

from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.silicon.costs import MeasuredCosts
from banaserve.silicon.step_times import GpuStepTimes
from banaserve.sim.cluster.cluster import SimCluster


def install(cluster: SimCluster, profile: Profile, times: GpuStepTimes, host_s: float) -> None:
    """Give measured step times to all engines of ``cluster``, before anything happens in it."""
    for cell in cluster.cells:
        for instance in cell.instances.values():
            instance.engine.costs = MeasuredCosts(profile, times, host_s)
