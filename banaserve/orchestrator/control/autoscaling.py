"""Scaling by load: one instance more if a role is full, one less if fewer instances suffice.

Pure: the previous state is an argument and part of the result. Hysteresis is in the levels, since
shrinking is decided by the load that the other instances would have then, with a level well below
that of growing; and in time, since a load must last, longer for shrinking than for growing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from banaserve.base.types import ClusterView, InstanceView, Role
from banaserve.orchestrator.control.measure import STALE_AFTER_S, load_of


@dataclass(frozen=True, slots=True)
class AutoscaleOptions:
    """Bounds of the number of instances, and the loads that change it.

    Attributes:
        least, most: Minimum and maximum number of instances of all roles together.
        grow_above: Mean load of a role, in [0, 1], above which an instance is added.
        shrink_below: Predicted mean load of the remaining instances below which one is removed.
        grow_after_s, shrink_after_s: Time that the load must last without a break, in seconds.
    """

    least: int
    most: int
    grow_above: float = 0.8
    shrink_below: float = 0.5
    grow_after_s: float = 30.0
    shrink_after_s: float = 300.0


@dataclass(frozen=True, slots=True)
class LoadsSince:
    """Times since which each role has been above the upper level, and below the lower one."""

    high: Mapping[Role, float] = field(default_factory=dict)
    low: Mapping[Role, float] = field(default_factory=dict)


class ScaleStep(NamedTuple):
    """Addition or removal of one instance.

    Attributes:
        role: Role of the instance; COLOCATED stands for all roles if roles follow the load.
        change: Change of the number of instances: 1 or -1.
        why: Reason, in words.
    """

    role: Role
    change: int
    why: str


def next_step(
    cluster: ClusterView, options: AutoscaleOptions, before: LoadsSince, by_role: bool
) -> tuple[ScaleStep | None, LoadsSince]:
    """Return the next scaling step, or None, and the state for the next call.

    A role with an instance that does not serve or has not reported recently is not scaled.

    Args:
        before: State that the previous call returned.
        by_role: True if each role has instances of its own; otherwise all form one group.
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
    """Return the mean load, by the fullest resource of each instance; None if one is unknown."""
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
