"""Smoothed reports: what is blended, and what stays as it was reported."""

from __future__ import annotations

from dataclasses import fields, replace

from banaserve.base.types import (
    ClusterView,
    InstanceId,
    InstanceReport,
    InstanceView,
    Module,
    ModulePlacement,
    Role,
)
from banaserve.orchestrator.control.costs.profile import load
from banaserve.orchestrator.control.measure import smoothed

BLENDED = {"kv_used_fraction", "busy_fraction", "step_fill_fraction", "step_s"}


def test_everything_but_the_blended_shares_is_kept() -> None:
    names = [field.name for field in fields(InstanceReport)]
    old = InstanceReport(*range(1, len(names) + 1))
    new = replace(old, **{name: getattr(old, name) + 10 for name in names})
    name = InstanceId("d0")
    placement = ModulePlacement(Module(0, 2), name, InstanceId("p0"), 3, 0.5, 7)
    facts = load("opt-13b-a100").facts
    view = InstanceView(name, Role.DECODE, True, new, 5, 6, 7.0, facts, (placement,), 9, 0.5)
    cluster = ClusterView(30.0, {name: view})
    seen, after = smoothed(cluster, {name: old}, window_s=20.0)
    for field in names:
        expected = getattr(old, field) + (5 if field in BLENDED else 10)
        assert getattr(after[name], field) == expected, field
    assert seen == replace(cluster, instances={name: replace(view, report=after[name])})
