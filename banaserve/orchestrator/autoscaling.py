"""Growing and shrinking by load: one instance more where a role is full, one less where few do.

Pure: what went before comes in and goes out. Hysteresis is in the levels, since one less is decided
by the load that the others would have then, which lies well below the level of one more; and in
time, since a load must last, longer for one less than for one more.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from banaserve.orchestrator.measure import STALE_AFTER_S, load_of
from banaserve.types import ClusterView, InstanceView, Role


@dataclass(frozen=True, slots=True)
class AutoscaleOptions:
    """Bounds of the number of instances, and the loads that change it.

    Attributes:
        least, most: Instances of all roles together.
        grow_above: Mean load of a role, in [0, 1], above which there is to be one more.
        shrink_below: Predicted mean load of those that stay, below which there is to be one less.
        grow_after_s, shrink_after_s: For so long without a break.
    """

    least: int
    most: int
    grow_above: float = 0.8
    shrink_below: float = 0.5
    grow_after_s: float = 30.0
    shrink_after_s: float = 300.0


@dataclass(frozen=True, slots=True)
class LoadsSince:
    """Since when each role has been above the upper level, and below the lower one."""

    high: Mapping[Role, float] = field(default_factory=dict)
    low: Mapping[Role, float] = field(default_factory=dict)


class ScaleStep(NamedTuple):
    """One instance more or less.

    Attributes:
        role: COLOCATED stands for all where roles follow the load.
        change: 1 or -1.
        why: In words.
    """

    role: Role
    change: int
    why: str


def next_step(
    cluster: ClusterView, options: AutoscaleOptions, before: LoadsSince, by_role: bool
) -> tuple[ScaleStep | None, LoadsSince]:
    """Return what to do about the load, if anything, and what to hand in the next time.

    A role of which an instance does not serve or has not reported lately is left as it is.

    Args:
        by_role: Each role has instances of its own; otherwise all are one group.
    """
    groups = _groups(cluster, by_role)
    means = {role: _mean(views, cluster.now_s) for role, views in groups.items()}
    loads = {role: load for role, load in means.items() if load is not None}
    fewer = {
        role: load * len(groups[role]) / (len(groups[role]) - 1)
        for role, load in loads.items()
        if len(groups[role]) > 1
    }
    now_s = cluster.now_s
    since = LoadsSince(
        {r: before.high.get(r, now_s) for r, load in loads.items() if load >= options.grow_above},
        {r: before.low.get(r, now_s) for r, load in fewer.items() if load <= options.shrink_below},
    )
    total = len(cluster.instances)
    full = [r for r, at_s in since.high.items() if now_s - at_s >= options.grow_after_s]
    if full and total < options.most:
        role = max(full, key=lambda one: loads[one])
        return ScaleStep(role, 1, f"{_name(role, by_role)} at {loads[role]:.0%}"), since
    empty = [r for r, at_s in since.low.items() if now_s - at_s >= options.shrink_after_s]
    if empty and total > options.least and not since.high:
        role = min(empty, key=lambda one: fewer[one])
        why = f"{_name(role, by_role)} would be at {fewer[role]:.0%} with one less"
        return ScaleStep(role, -1, why), since
    return None, since


def _groups(cluster: ClusterView, by_role: bool) -> dict[Role, list[InstanceView]]:
    groups: dict[Role, list[InstanceView]] = {}
    for view in cluster.instances.values():
        groups.setdefault(view.role if by_role else Role.COLOCATED, []).append(view)
    return groups


def _mean(views: Sequence[InstanceView], now_s: float) -> float | None:
    """Mean load, each as full as its fullest resource; None where one is not known."""
    total = 0.0
    for view in views:
        age_s = view.report_age_s(now_s)
        if not view.ready or view.report is None or age_s is None or age_s > STALE_AFTER_S:
            return None
        load = load_of(view.report)
        total += max(load.compute, load.memory)
    return total / len(views)


def _name(role: Role, by_role: bool) -> str:
    return role.value if by_role else "all instances together"
