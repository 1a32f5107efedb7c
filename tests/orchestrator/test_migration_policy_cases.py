"""Cases of the migration policies whose answer is known, figure 2(b) first."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

import migration_clusters as known
from banaserve.base.types import (
    Attempt,
    BackPressure,
    ClusterView,
    Distance,
    InstanceId,
    Module,
    MoveModule,
    ReturnModule,
    Role,
    SwitchRole,
)
from banaserve.orchestrator.control.move_policies import scoring
from banaserve.orchestrator.control.move_policies.interface import MigrationPlan, RejectReason
from banaserve.orchestrator.control.move_policies.registry import POLICIES, make, names
from banaserve.orchestrator.planner.loop.time_scaling import stretched
from depth import seeds

OPT_13B, cluster, instance = known.OPT_13B, known.cluster, known.instance

FIGURE_2B = cluster(instance("p0", 0.95, 0.35), instance("d0", 0.35, 0.95))


def reasons(plan: MigrationPlan, words: str = "") -> set[RejectReason]:
    return {r.reason for r in plan.rejected if words in r.candidate}


def test_figure_2b_moves_nothing_as_published() -> None:
    plan = make("published").plan(FIGURE_2B)
    assert plan.gap == pytest.approx(0.0)
    assert plan.steps == ()
    assert plan.reason == "no instance is overloaded while another is underloaded"


def test_figure_2b_moves_memory_from_decode_to_prefill_when_repaired() -> None:
    plan = make("repaired").plan(FIGURE_2B)
    assert plan.gap == pytest.approx(0.6)
    assert plan.is_balancing
    [step] = plan.steps
    assert isinstance(step.action, MoveModule)
    assert (step.action.host, step.action.guest) == ("d0", "p0")
    felt = dict(step.influence)
    assert felt["d0"].kv_blocks > 0 > felt["p0"].kv_blocks
    # Host and guest take turns, so nothing may be promised for the compute of p0.
    assert RejectReason.NO_OVERLAP in reasons(plan, "from p0")


def far_2b(distance: Distance | None) -> ClusterView:
    """Figure 2(b) with ``p0`` on another machine."""
    d0 = replace(FIGURE_2B.instances[InstanceId("d0")], far={InstanceId("p0"): distance})
    return cluster(FIGURE_2B.instances[InstanceId("p0")], d0)


@pytest.mark.parametrize("preset", ["repaired", "published"])
def test_nothing_goes_to_a_machine_whose_way_nobody_has_measured(preset: str) -> None:
    idle, full = instance("p0", 0.1, 0.1), instance("d0", 0.9, 0.9)
    assert make(preset).plan(cluster(idle, full)).steps
    plan = make(preset).plan(cluster(idle, replace(full, far={idle.id: None})))
    assert plan.steps == ()
    assert RejectReason.NOT_MEASURED in reasons(plan, "from d0")


def test_a_quick_way_to_another_machine_is_as_none() -> None:
    near = make("repaired").plan(FIGURE_2B)
    assert make("repaired").plan(far_2b(Distance(1e-6, 1e12))).steps == near.steps


def test_what_crosses_a_slow_way_costs_what_it_takes() -> None:
    [near] = make("repaired").plan(FIGURE_2B).steps
    [far] = make("repaired").plan(far_2b(Distance(1e-4, 5e9))).steps
    assert isinstance(near.action, MoveModule)
    assert isinstance(far.action, MoveModule)
    assert far.cost_s == pytest.approx(far.action.num_bytes / 5e9 + 0.005)
    host = InstanceId("d0")
    assert dict(far.influence)[host].step_s > dict(near.influence)[host].step_s
    assert far.action.num_bytes < near.action.num_bytes


@pytest.mark.parametrize("factor", [1.0, 4.0])
def test_in_stretched_time_everything_is_on_the_wall_clock_and_so_are_ways(factor: float) -> None:
    """Steps, links and a way that take so many times as long: the same plan, as many times as dear.

    A measured way is not converted, since nothing else that it is compared with is.
    """
    way = Distance(1e-4 * factor, 5e9 / factor)
    now_s, step_s = 100.0 * factor, 0.03 * factor
    p0 = instance("p0", 0.95, 0.35, now_s=now_s, step_s=step_s)
    d0 = instance("d0", 0.35, 0.95, now_s=now_s, step_s=step_s)
    views = [replace(p0, far={d0.id: way}), replace(d0, far={p0.id: way})]
    views = [replace(v, prefill_tokens_per_s=v.prefill_tokens_per_s / factor) for v in views]
    learnt = {
        "link_bytes_per_s": 12.5e9 / factor,
        "link_sync_s": 0.005 * factor,
        "link_hop_s": 20e-6 * factor,
    }
    options = stretched(POLICIES.get("repaired").Options, {}, factor)
    [step] = make("repaired", **options, **learnt).plan(cluster(*views, now_s=now_s)).steps
    [usual] = make("repaired").plan(far_2b(Distance(1e-4, 5e9))).steps
    assert step.action == usual.action
    assert step.cost_s == pytest.approx(factor * usual.cost_s)
    host = InstanceId("d0")
    felt_s = dict(step.influence)[host].step_s
    assert felt_s == pytest.approx(factor * dict(usual.influence)[host].step_s)


def test_what_is_too_far_is_refused_with_the_seconds_of_a_step() -> None:
    plan = make("repaired").plan(far_2b(Distance(0.1, 1e6)))
    assert plan.steps == ()
    too_far = [one for one in plan.rejected if one.reason is RejectReason.TOO_FAR]
    layers = next(one for one in too_far if "heads" not in one.candidate)
    # 48 tokens of 10,240 bytes there and back at 1 MB/s, and one round trip.
    assert layers.value == pytest.approx(0.1 + 2 * 48 * 10_240 / 1e6)


def test_what_nobody_near_would_take_either_is_not_refused_for_its_way() -> None:
    for distance in (Distance(1e-6, 1e12), Distance(0.1, 1e6)):
        plan = make("repaired", rho=1e6).plan(far_2b(distance))
        assert plan.steps == ()
        assert RejectReason.NOT_WORTH_IT in reasons(plan, "from d0")
        assert RejectReason.TOO_FAR not in reasons(plan)


def test_who_is_near_is_taken_before_who_is_far() -> None:
    far_away = {InstanceId("p0"): Distance(0.1, 1e6)}
    d0 = replace(instance("d0", 0.35, 0.95), far=far_away)
    view = cluster(instance("p0", 0.95, 0.30), instance("p1", 0.95, 0.35), d0)
    [step] = make("repaired").plan(view).steps
    assert isinstance(step.action, MoveModule)
    assert step.action.guest == "p1"


def test_heads_of_figure_2b_by_hand() -> None:
    """Eight of 40 heads: 4134 blocks of 1,600 slabs become 4134 x 1600 / 1280 = 5167.5."""
    options = {"delta_layers": 2.0, "max_away_fraction": 0.2, "rho": 0.0}
    [step] = make("repaired", **options).plan(FIGURE_2B).steps
    assert isinstance(step.action, MoveModule)
    assert step.action.module == Module(0, 40, tuple(range(32, 40)))
    felt = dict(step.influence)
    assert felt["d0"].kv_blocks == 5167 - 4134
    # What travels is in use: 0.95 x 4134 blocks of 320 slabs of 8,192 bytes.
    assert step.action.num_bytes == pytest.approx(0.95 * 4134 * 320 * 8192, abs=1)
    assert step.cost_s == pytest.approx(step.action.num_bytes / 12.5e9 + 0.005)
    # Attention is 0.3 of a layer, a fifth of the heads moves: 0.06 of d0's 0.35.
    assert felt["p0"].compute == pytest.approx(0.06 * 0.35)
    assert felt["p0"].guest_bytes == 5167 * 320 * 8192


@pytest.mark.parametrize(("overlap_fraction", "relief"), [(0.0, 0.0), (0.5, 0.5), (1.0, 1.0)])
def test_layers_relieve_compute_only_as_far_as_host_and_guest_overlap(
    overlap_fraction: float, relief: float
) -> None:
    """A quarter of the layers is a quarter of 0.9; the guest takes it whole."""
    facts = replace(OPT_13B, can_move_heads=False)
    view = cluster(
        instance("p0", 0.9, 0.1, facts=facts, step_s=0.0),
        instance("p1", 0.1, 0.1, facts=facts, step_s=0.0),
    )
    options = {"overlap_fraction": overlap_fraction, "max_away_fraction": 0.2, "rho": 0.0}
    plan = make("repaired", **options).plan(view)
    if not relief:
        assert plan.steps == ()
        assert RejectReason.NO_OVERLAP in reasons(plan)
        return
    [step] = plan.steps
    felt = dict(step.influence)
    assert felt["p0"].compute == pytest.approx(-relief * 0.2 * 0.9)
    assert felt["p1"].compute == pytest.approx(0.2 * 0.9)


def test_what_a_host_says_of_overlap_wins_over_the_option() -> None:
    """Small batches are bound by reading weights: no layers leave for compute."""
    facts = replace(OPT_13B, can_move_heads=False)
    hosts = [
        instance(f"p{n}", load, 0.1, facts=facts, step_s=0.0) for n, load in enumerate((0.9, 0.1))
    ]

    def plan(said: float | None) -> MigrationPlan:
        views = [
            replace(view, report=replace(view.report, overlap_fraction=said))  # type: ignore[type-var]
            for view in hosts
        ]
        options = {"overlap_fraction": 0.5, "max_away_fraction": 0.2, "rho": 0.0}
        return make("repaired", **options).plan(cluster(*views))

    none = plan(0.0)
    assert none.steps == ()
    assert RejectReason.NO_OVERLAP in reasons(none)
    for said, relief in ((None, 0.5), (0.8, 0.8)):
        [step] = plan(said).steps
        assert dict(step.influence)["p0"].compute == pytest.approx(-relief * 0.2 * 0.9)


def test_bytes_that_free_no_block_count_for_nothing() -> None:
    """40 slabs of 100 blocks, granules of 100: a head away gives each other slab a third of one."""
    facts = replace(
        OPT_13B,
        num_kv_heads=4,
        layer_token_bytes=2048,
        granule_bytes=100 * 16 * 512,
        memory_bytes=40 * OPT_13B.layer_weight_bytes + OPT_13B.fixed_bytes + 160 * 100 * 16 * 512,
        can_move_layers=False,
    )
    view = cluster(instance("d0", 0.3, 0.95, facts=facts), instance("d1", 0.1, 0.1, facts=facts))
    plan = make("repaired", rho=0.0, max_away_fraction=0.25).plan(view)
    assert plan.steps == ()
    assert reasons(plan, "heads 3") == {RejectReason.NO_BLOCK_FREED}
    fine = replace(facts, granule_bytes=1)
    view = cluster(instance("d0", 0.3, 0.95, facts=fine), instance("d1", 0.1, 0.1, facts=fine))
    [step] = make("repaired", rho=0.0, max_away_fraction=0.25).plan(view).steps
    assert dict(step.influence)["d0"].kv_blocks == 133 - 100


def test_a_prefill_flood_makes_a_decode_instance_prefill() -> None:
    view = cluster(
        instance("p0", 1.0, 0.2, waiting_s=30.0),
        *(instance(f"d{n}", 0.1 + n / 100, 0.05) for n in range(3)),
    )
    plan = make("repaired", max_moves=1).plan(view)
    [step] = plan.steps
    assert step.action == SwitchRole("d0", Role.DECODE, Role.PREFILL)
    felt = dict(step.influence)
    # p0 did 1.0 and kept 30 s waiting; two prefill instances share both.
    assert felt["p0"].compute == pytest.approx(-0.5)
    assert felt["p0"].waiting_s == pytest.approx(-15.0)
    assert felt["d0"].compute == pytest.approx(0.5 - 0.1)
    assert felt["d1"].compute == pytest.approx(0.1 / 2)


def test_prompts_that_wait_for_room_in_the_store_are_no_prefill_flood() -> None:
    """Were a decode instance to prefill, still less would be taken out of the store."""
    flooded = instance("p0", 0.2, 0.2, waiting_s=30.0)
    decodes = [instance(f"d{n}", 0.1 + n / 100, 0.05) for n in range(3)]
    assert flooded.report is not None
    assert make("repaired", max_moves=1).plan(cluster(flooded, *decodes)).steps
    pressure = BackPressure(9, flooded.inflight_prefill_tokens, 4.0, 12, 12, 4096)
    waiting = replace(flooded, report=replace(flooded.report, back_pressure=pressure))
    plan = make("repaired", max_moves=1).plan(cluster(waiting, *decodes))
    assert not any(isinstance(step.action, SwitchRole) for step in plan.steps)
    assert waiting.computable_prefill_tokens == 0


def test_the_prompts_of_all_instances_wait_for_the_store_that_is_waited_for_longest() -> None:
    small, large = BackPressure(1, 10, 2.0, 5, 6, 4096), BackPressure(2, 20, 1.0, 50, 60, 4096)
    views = [instance(name, 0.1, 0.1) for name in ("p0", "p1", "d0")]
    found = [
        replace(view, report=replace(view.report, back_pressure=one))
        for view, one in zip(views, (small, large, None), strict=True)
    ]
    assert cluster(*found).back_pressure == BackPressure(3, 30, 2.0, 5, 6, 4096)
    assert cluster(*views).back_pressure is None


@pytest.mark.parametrize(("num_decode", "changed", "switches"), [(7, 0, 2), (7, 1, 1), (31, 0, 4)])
def test_only_some_instances_change_roles_within_a_dwell_time(
    num_decode: int, changed: int, switches: int
) -> None:
    """An eighth of them, and two of a few; those that have just changed count too."""
    view = cluster(
        instance("p0", 1.0, 0.2, waiting_s=120.0),
        *(
            instance(f"d{n:02}", 0.01, 0.01, changed_s=95.0 if n < changed else None)
            for n in range(num_decode)
        ),
    )
    plan = make("repaired", max_moves=9, rho=0.0).plan(view)
    taken = [step for step in plan.steps if isinstance(step.action, SwitchRole)]
    assert len(taken) == switches
    assert RejectReason.SWITCH_LIMIT in reasons(plan, "switch")


def test_an_instance_keeps_room_for_what_may_come() -> None:
    """An empty guest would be emptied of all its blocks: nothing in use is no limit."""
    view = cluster(instance("p0", 0.1, 0.0), instance("d0", 0.3, 0.97))
    [step] = make("repaired", rho=0.0, migration_budget_s=1e3).plan(view).steps
    left = 4134 + dict(step.influence)["p0"].kv_blocks
    assert left >= 0.25 * 4134


def test_a_role_keeps_its_last_instance() -> None:
    view = cluster(instance("p0", 1.0, 0.2, waiting_s=90.0), instance("d0", 0.0, 0.0))
    plan = make("repaired").plan(view)
    assert not any(isinstance(step.action, SwitchRole) for step in plan.steps)


def returnable(changed_s: float | None = None) -> Any:
    """d0 has had a quarter of its layers at p0 and is idle again; p0 has much to do."""
    busy = cluster(instance("p0", 0.3, 0.2), instance("d0", 0.4, 0.94))
    policy = make("repaired", delta_heads=0.2, max_away_fraction=0.25)
    plan = policy.plan(busy)
    there = known.settled(busy, plan.steps, 50.0)
    quiet = {
        name: replace(
            view,
            changed_s=changed_s,
            report=replace(view.report, kv_used_fraction=0.02, busy_fraction=0.05, at_s=100.0),
        )
        for name, view in there.instances.items()
    }
    return replace(there, now_s=100.0, instances=quiet)


def test_modules_come_home_when_the_load_has_gone() -> None:
    view = returnable()
    [placement] = view.instances["d0"].placements
    [step] = make("repaired", weights_are_shared=True).plan(view).steps
    assert isinstance(step.action, ReturnModule)
    assert step.action.module == placement.module
    felt = dict(step.influence)
    assert felt["p0"].guest_bytes == -placement.guest_bytes
    assert felt["d0"].kv_blocks < 0 < felt["p0"].kv_blocks


def test_dwell_keeps_what_has_just_changed() -> None:
    plan = make("repaired", weights_are_shared=True).plan(returnable(changed_s=95.0))
    assert plan.steps == ()
    assert reasons(plan, "return") == {RejectReason.DWELL}


def test_a_module_under_way_home_is_not_sent_home_again() -> None:
    view = returnable()
    policy = make("repaired", weights_are_shared=True, max_moves_per_instance=5)
    plan = policy.plan(view)
    assert policy.plan(replace(view, under_way=plan.steps)).steps == ()


@pytest.mark.parametrize(
    ("gap", "is_balancing", "moves"),
    [(0.25, False, True), (0.15, False, False), (0.15, True, True), (0.05, True, False)],
)
def test_two_thresholds(gap: float, is_balancing: bool, moves: bool) -> None:
    view = cluster(
        instance("d0", 0.2, 0.9), instance("d1", 0.2, 0.9 - gap), is_balancing=is_balancing
    )
    plan = make("repaired", rho=0.0, delta_layers=0.1, delta_heads=0.02).plan(view)
    assert bool(plan.steps) is moves


@pytest.mark.parametrize(
    ("section", "reason"),
    [
        ({"rho": 1e6}, RejectReason.NOT_WORTH_IT),
        ({"migration_budget_s": 0.01}, RejectReason.MIGRATION_BUDGET),
        ({"tpot_budget_s": 0.03, "link_hop_s": 0.01}, RejectReason.TPOT_BUDGET),
        ({"ttft_budget_s": 0.01, "tpot_budget_s": 9.0}, RejectReason.TTFT_BUDGET),
        ({"delta_layers": 0.7, "delta_heads": 0.7}, RejectReason.GAP_TOO_SMALL),
        ({"memory_limit_fraction": 0.05}, RejectReason.NO_ROOM),
        ({"min_blocks_fraction": 0.999}, RejectReason.NO_ROOM),
        ({"max_away_fraction": 0.01}, None),
    ],
)
def test_limits_forbid_the_move_of_figure_2b(
    section: dict[str, Any], reason: RejectReason | None
) -> None:
    plan = make("repaired", **section).plan(FIGURE_2B)
    assert plan.steps == ()
    assert reason is None or reason in reasons(plan)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"can_move_layers": False, "can_move_heads": False}, RejectReason.NOT_SUPPORTED),
        ({"layer_weight_bytes": 1}, RejectReason.OTHER_MODEL),
    ],
)
@pytest.mark.parametrize("name", ["repaired", "published"])
def test_what_the_guest_cannot_run_is_not_sent_there(
    name: str, change: dict[str, Any], reason: RejectReason
) -> None:
    view = cluster(
        instance("d0", 0.35, 0.95), instance("p0", 0.3, 0.35, facts=replace(OPT_13B, **change))
    )
    plan = make(name).plan(view)
    assert plan.steps == ()
    assert reason in reasons(plan)


def test_the_published_preset_moves_until_the_sums_are_even() -> None:
    """d0 at 1.6, p0 at 0.4: each four layers take a tenth of what d0 has left along."""
    view = cluster(instance("d0", 0.9, 0.7), instance("p0", 0.2, 0.2))
    plan = make("published", delta=0.4).plan(view)
    loads, moves = [1.6, 0.4], 0
    while loads[0] - loads[1] > 0.4:
        loads, moves = [loads[0] * 0.9, loads[1] + loads[0] * 0.1], moves + 1
    assert moves == 3
    assert [step.action.module for step in plan.steps if isinstance(step.action, MoveModule)] == [
        Module(36, 40),
        Module(32, 36),
        Module(28, 32),
    ]


def test_the_published_preset_moves_heads_only_where_layers_cannot() -> None:
    heads_only = replace(OPT_13B, can_move_layers=False)
    view = cluster(
        instance("d0", 0.9, 0.9, facts=heads_only), instance("p0", 0.1, 0.1, facts=heads_only)
    )
    plan = make("published", delta=1.5, heads_a_move=2).plan(view)
    [first, *_] = plan.steps
    assert isinstance(first.action, MoveModule)
    assert first.action.module == Module(0, 40, (38, 39))


def test_the_published_preset_ends_when_a_pass_changes_nothing() -> None:
    """To the letter it would spin: overloaded and underloaded instances stay, nothing can move."""
    nothing = replace(OPT_13B, can_move_layers=False, can_move_heads=False)
    view = cluster(instance("d0", 0.9, 0.9, facts=nothing), instance("p0", 0.1, 0.1, facts=nothing))
    plan = make("published").plan(view)
    assert plan.steps == ()
    assert plan.reason == "the fullest instance can give nothing to the emptiest"


def test_the_static_baseline_stays_still() -> None:
    assert names() == ["elastic", "published", "repaired", "still"]
    assert make("still").plan(FIGURE_2B).steps == ()


@pytest.mark.parametrize(("policy", "least"), [("still", 0), ("published", 1), ("repaired", 3)])
def test_what_failed_a_moment_ago_is_looked_past(policy: str, least: int) -> None:
    """Its host and guest do something else; what needs neither is not held up."""
    view = cluster(instance("p0", 0.5, 0.1), instance("p1", 0.5, 0.2), instance("d0", 0.5, 0.95))
    plan = make(policy).plan(view)
    tried = 0
    while plan.steps:
        first = plan.steps[0]
        attempt = Attempt.of(first.action)
        assert attempt not in view.failed
        view = replace(view, failed=view.failed | {attempt})
        plan = make(policy).plan(view)
        assert RejectReason.FAILED in reasons(plan)
        tried += 1
    assert tried >= least


@pytest.mark.parametrize("seed", seeds(12, 12))
def test_moves_that_are_not_weighed_would_not_have_been_taken(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    draws = random.Random(seed)
    size = draws.choice((9, 16, 24))
    views = [instance(f"{'pd'[n % 2]}{n}", draws.random(), draws.random()) for n in range(size)]
    view = cluster(*views)
    bounded = make("repaired").plan(view)
    monkeypatch.setattr(scoring, "most_net_s", lambda host, guest, options: float("inf"))
    whole = make("repaired").plan(view)
    assert (bounded.steps, bounded.gap, bounded.reason) == (whole.steps, whole.gap, whole.reason)
    assert whole.steps
    assert len(bounded.rejected) <= len(whole.rejected)


def test_a_faster_guest_relieves_compute_of_a_host_with_little_in_memory() -> None:
    """No bound by its memory may leave the move out, though a role switch brings something, too."""
    loads = {"p0": (0.17, 0.09, 4.0), "d1": (0.98, 0.46, 0.5), "d2": (0.6, 0.0, 4.0)}
    loads["p3"] = (0.48, 0.6, 1.0)
    views = [
        instance(name, compute, memory, facts=replace(OPT_13B, speed=speed))
        for name, (compute, memory, speed) in loads.items()
    ]
    [first, *_] = make("repaired", link_bytes_per_s=50e9).plan(cluster(*views)).steps
    assert isinstance(first.action, MoveModule)
    assert (first.action.host, first.action.guest) == ("d1", "p0")
