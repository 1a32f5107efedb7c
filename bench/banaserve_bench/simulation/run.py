"""Runs of cases and workloads through simulated systems."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.sim.cluster.cluster import WHOLE, ClusterPart, SimCluster
from banaserve.sim.request import SimRequest
from banaserve.sim.result import SIMULATED, LatencyLimits, Tally, summary, tally
from banaserve.sim.system import System
from banaserve.sim.timeline import Timeline
from banaserve_bench.simulation.case import Case
from banaserve_bench.simulation.events import Event, arrange


def simulate(
    profile: Profile,
    system: System,
    requests: Iterable[SimRequest],
    limits: LatencyLimits | None = None,
    events: Sequence[Event] = (),
    watch: Callable[[SimCluster], None] | None = None,
) -> dict[str, Any]:
    """Send ``requests``, in the order of their arrivals, through ``system`` until all have ended.

    Equal arguments give equal results. ``steps`` of the result are the migrations carried out.

    Args:
        watch: Called with the cluster before anything happens.
    """
    return told(tallied(profile, system, requests, events, watch), profile, system, limits)


def tallied(
    profile: Profile,
    system: System,
    requests: Iterable[SimRequest],
    events: Sequence[Event] = (),
    watch: Callable[[SimCluster], None] | None = None,
    part: ClusterPart = WHOLE,
) -> Tally:
    """Return the totals of a run; ``requests`` are those of the ``part`` of the cells."""
    timeline = Timeline()
    cluster = SimCluster(timeline, profile, system, part)
    if watch is not None:
        watch(cluster)
    for event in events:
        arrange(event, cluster, timeline)
    num_requests = 0

    def counted() -> Iterator[SimRequest]:
        nonlocal num_requests
        for request in requests:
            num_requests += 1
            yield request

    cluster.run(counted())
    return tally(cluster, timeline, num_requests)


def told(
    found: Tally, profile: Profile, system: System, limits: LatencyLimits | None = None
) -> dict[str, Any]:
    """Return the result of a run, ready for JSON."""
    result = summary(found, limits or LatencyLimits())
    result["profile"] = profile.name
    result["system"] = system.kind
    result["num_events"] = found.num_events
    result["steps"] = [{"at_s": at_s, "step": words} for at_s, words in found.steps]
    return result


def judged(case: Case, seed: int, systems: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Return the outcome of a case whose ``systems`` have run.

    Returns:
        ``systems``: results by name; ``goals``: goals, each with its value and whether it is
        reached, without those whose systems have not run; ``is_reached``: whether all are reached.
    """
    goals = []
    for goal in case.goals:
        if not {goal.system, goal.relative_to or goal.system} <= set(systems):
            continue
        value = goal.value(systems)
        goals.append(
            {
                "system": goal.system,
                "metric": goal.metric,
                "relative_to": goal.relative_to,
                "at_least": goal.at_least,
                "at_most": goal.at_most,
                "value": value,
                "is_reached": goal.is_reached(value),
            }
        )
    return {
        "time": SIMULATED,
        "case": case.name,
        "about": case.about,
        "seed": seed,
        "systems": dict(systems),
        "goals": goals,
        "is_reached": all(goal["is_reached"] for goal in goals),
    }
