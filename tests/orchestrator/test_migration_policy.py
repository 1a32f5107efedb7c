"""What holds for the migration policies on any cluster."""

from __future__ import annotations

import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import migration_clusters as clusters_module
from banaserve.base.types import (
    ClusterView,
    InstanceFacts,
    InstanceView,
    Module,
    MoveModule,
    ReturnModule,
    Role,
    SwitchRole,
)
from banaserve.orchestrator.control.move_policies.registry import make
from banaserve.orchestrator.control.projection import slabs
from depth import num_examples

blocks_of, cluster_of = clusters_module.blocks_of, clusters_module.cluster
instance, settled = clusters_module.instance, clusters_module.settled

DWELL_S = 10.0
EAGER: dict[str, Any] = {"rho": 0.0, "delta_up": 0.05, "delta_down": 0.02, "delta_heads": 0.02}
OVERLAPPING: dict[str, Any] = {**EAGER, "overlap_fraction": 0.7, "weights_are_shared": True}
POLICIES: list[tuple[str, dict[str, Any]]] = [
    ("repaired", {}),
    ("repaired", EAGER),
    ("repaired", {**OVERLAPPING, "remote_cost": 0.0, "max_moves_per_instance": 3}),
    ("published", {"delta": 0.05}),
    ("published", {"scalar": "maximum", "layers_a_move": 1, "max_away_fraction": 1.0}),
]
REPAIRED = [section for name, section in POLICIES if name == "repaired"]

facts = st.builds(
    lambda layers, heads, blocks, granule, movable: InstanceFacts(
        num_layers=layers,
        num_kv_heads=heads,
        layer_weight_bytes=3_000_000,
        layer_token_bytes=heads * 256,
        block_tokens=16,
        memory_bytes=layers * 3_000_000 + 1_000_000 + layers * heads * 4096 * blocks,
        fixed_bytes=1_000_000,
        granule_bytes=granule,
        hidden_bytes=1024,
        can_move_layers=movable,
    ),
    layers=st.sampled_from([8, 12]),
    heads=st.sampled_from([1, 4]),
    blocks=st.integers(30, 400),
    granule=st.sampled_from([1, 65536]),
    movable=st.booleans(),
)


@st.composite
def clusters(draw: st.DrawFn, waiting: bool = True) -> ClusterView:
    """Up to seven instances, most of the same model, some of them silent or not to be moved."""
    common = draw(facts)
    views = []
    for number in range(draw(st.integers(0, 7))):
        own = draw(st.sampled_from([common, common, common, draw(facts), None]))
        view = instance(
            f"{draw(st.sampled_from('ppddc'))}{number}",
            draw(st.floats(0, 1.2)),
            draw(st.floats(0, 1)),
            facts=own,
            waiting_s=draw(st.sampled_from([0.0, 0.0, 5.0, 60.0])) if waiting else 0.0,
            waiting=draw(st.sampled_from([0, 0, 9])) if waiting else 0,
            changed_s=draw(st.sampled_from([None, 95.0, 80.0])),
        )
        if draw(st.integers(0, 9)) == 0:
            view = replace(view, ready=False)
        views.append(view)
    return cluster_of(*views)


policies = pytest.mark.parametrize(("name", "section"), POLICIES)


@policies
@settings(max_examples=num_examples(25))
@given(view=clusters())
def test_a_plan_ends_is_feasible_and_the_same_twice(
    name: str, section: dict[str, Any], view: ClusterView
) -> None:
    policy = make(name, **section)
    plan = policy.plan(view)
    assert plan == make(name, **section).plan(view)
    assert set(plan.left_out) == {
        v.id for v in view.instances.values() if not v.ready or v.facts is None
    }
    at = view
    for step in plan.steps:
        assert step.cost_s >= 0
        assert step.timeout_s >= step.cost_s
        assert not step.is_finished(at)
        assert not set(step.instances) & set(plan.left_out)
        if isinstance(step.action, MoveModule):
            _check_module(at, step.action.module, step.action.host, step.action.guest)
        at = settled(at, (step,), at.now_s)
        assert step.is_finished(at)
        for instance_id in step.instances:
            _check_room(view.instances[instance_id], at.instances[instance_id], name)


def _check_module(view: ClusterView, module: Module, host_id: Any, guest_id: Any) -> None:
    host, guest = view.instances[host_id], view.instances[guest_id]
    assert host is not guest
    assert host.facts is not None
    assert host.ready
    assert guest.ready
    assert 0 <= module.first_layer < module.end_layer <= host.facts.num_layers
    assert set(module.heads) <= set(range(host.facts.num_kv_heads))
    assert module.heads or host.facts.can_move_layers
    assert not any(p.module.overlaps(module) for p in host.placements)
    assert not guest.placements, "a guest gives nothing away itself"


def _check_room(before: InstanceView, after: InstanceView, name: str) -> None:
    """The KV blocks in use fit, unless they did not before and have not become fewer."""
    assert after.facts is not None
    assert after.report is not None
    away = [placement.module for placement in after.placements]
    left = slabs.blocks(after.facts, away, after.report.guest_bytes)
    if left < blocks_of(before):
        assert left >= 1
        assert after.report.kv_used_fraction <= 1 or name == "published"


@pytest.mark.parametrize("section", REPAIRED)
@settings(max_examples=num_examples(20))
@given(view=clusters(waiting=False), waiting_s=st.floats(0, 40))
def test_constant_load_never_oscillates(
    section: dict[str, Any], view: ClusterView, waiting_s: float
) -> None:
    """Each plan's influence becomes the state that the next one sees, until nothing is left to do.

    That no state comes back is not enough: a walk through ever new ones would be no better, so
    it has to end.
    """
    policy = make("repaired", **section, dwell_s=DWELL_S)
    states = set()
    for cycle in range(60):
        plan = policy.plan(view)
        if not plan.steps:
            break
        state = tuple((v.role, frozenset(v.placements)) for v in view.instances.values())
        assert state not in states
        states.add(state)
        now_s = 100.0 + (cycle + 1) * (DWELL_S + 1)
        view = replace(settled(view, plan.steps, now_s), is_balancing=plan.is_balancing)
    assert not policy.plan(view).steps, "still moving after 60 cycles"


@pytest.mark.parametrize("section", REPAIRED)
@settings(max_examples=num_examples(20))
@given(view=clusters())
def test_steps_under_way_are_counted_in(section: dict[str, Any], view: ClusterView) -> None:
    policy = make("repaired", **section)
    limit = section.get("max_moves_per_instance", 1)
    first = policy.plan(view)
    again = policy.plan(replace(view, under_way=first.steps))
    both = (*first.steps, *again.steps)
    taking_part = Counter(name for step in both for name in step.instances)
    assert max(taking_part.values(), default=0) <= limit
    modules = [(s.action.host, s.action.module) for s in both if isinstance(s.action, MoveModule)]
    for place, (host, module) in enumerate(modules):
        for other_host, other in modules[place + 1 :]:
            assert host != other_host or not module.overlaps(other)
    assert sum(step.cost_s for step in both) <= 10.0 + 1e-9


@settings(max_examples=num_examples(20))
@given(view=clusters())
def test_a_silent_instance_takes_no_part_and_is_named(view: ClusterView) -> None:
    for silent in view.instances.values():
        assert silent.report is not None
        old = replace(silent, report=replace(silent.report, at_s=view.now_s - 2.1))
        without = replace(view, instances={**view.instances, silent.id: old})
        for policy in (make("repaired", **EAGER), make("published")):
            plan = policy.plan(without)
            assert silent.id in plan.left_out
            assert all(silent.id not in dict(step.influence) for step in plan.steps)


def _operations(name: str, size: int) -> int:
    """Function calls, Python's and C's, of one decision over ``size`` instances."""
    views = [
        instance(f"{'pd'[n % 2]}{n:04}", (n * 37 % 101) / 101, (n * 53 % 97) / 97)
        for n in range(size)
    ]
    view, policy = cluster_of(*views), make(name)
    count = 0

    def see(frame: object, event: str, argument: object) -> None:
        nonlocal count
        count += event in ("call", "c_call")

    sys.setprofile(see)
    try:
        policy.plan(view)
    finally:
        sys.setprofile(None)
    return count


@pytest.mark.parametrize("name", ["repaired", "published"])
def test_the_work_of_a_decision_grows_no_faster_than_n_log_n(name: str) -> None:
    """From 128 to 1,024: eight times as many, and 10 halvings instead of 7."""
    assert _operations(name, 1024) <= 8 * (10 / 7) * 1.1 * _operations(name, 128)


@settings(max_examples=num_examples(25))
@given(
    facts,
    st.lists(st.tuples(st.integers(0, 11), st.integers(1, 4), st.sets(st.integers(0, 3)))),
    st.integers(1, 6),
)
def test_free_modules_touch_nothing_that_is_taken(
    known: InstanceFacts, taken: list[tuple[int, int, set[int]]], size: int
) -> None:
    gone = [
        Module(first, min(first + length, known.num_layers), tuple(sorted(heads)))
        for first, length, heads in taken
        if first < known.num_layers
    ]
    layers = slabs.free_layers(known, gone, size)
    if layers is None:
        for first in range(known.num_layers - size + 1):
            assert any(Module(first, first + size).overlaps(module) for module in gone)
    else:
        assert layers.num_layers == size
        assert not any(layers.overlaps(module) for module in gone)
    heads = slabs.free_heads(known, gone, size)
    if heads is not None:
        assert len(heads.heads) == size
        assert not any(heads.overlaps(module) for module in gone)


def test_roles_and_returns_occur_in_these_tests() -> None:
    """A guard: the closed loop above would prove little if it only ever moved modules out."""
    kinds: set[type] = set()
    policy = make("repaired", **OVERLAPPING)
    flood = cluster_of(
        instance("p0", 1.0, 0.2, waiting_s=30.0), *(instance(f"d{n}", 0.05, 0.05) for n in range(3))
    )
    kinds |= {type(step.action) for step in policy.plan(flood).steps}
    full = cluster_of(instance("p0", 0.1, 0.0), instance("d0", 0.3, 0.97))
    plan = policy.plan(full)
    kinds |= {type(step.action) for step in plan.steps}
    moved = replace(settled(full, plan.steps, 150.0), now_s=200.0)
    idle = {
        name: replace(old, report=replace(old.report, kv_used_fraction=0.05, at_s=200.0))
        for name, old in moved.instances.items()
    }
    kinds |= {type(step.action) for step in policy.plan(replace(moved, instances=idle)).steps}
    assert kinds == {SwitchRole, MoveModule, ReturnModule}
    assert {view.role for view in flood.instances.values()} == {Role.PREFILL, Role.DECODE}
