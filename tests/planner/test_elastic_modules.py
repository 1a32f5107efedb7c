"""Modules in the elastic policy: one plan with roles, only what the cost model speaks for."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banaserve.base.errors import UserError
from banaserve.base.types import (
    ClusterView,
    Distance,
    Influence,
    InstanceId,
    InstanceReport,
    InstanceView,
    Module,
    ModulePlacement,
    MoveModule,
    ObservedRequest,
    ReturnModule,
    Role,
    SetStepTokens,
    Step,
    SwitchRole,
)
from banaserve.orchestrator.control.costs import modules as costs
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.orchestrator.control.model.learnt_time import StepWork
from banaserve.orchestrator.control.move_policies import registry
from banaserve.orchestrator.planner.candidates import modules
from banaserve.orchestrator.planner.candidates.arrangement import Arrangement, arrangements
from banaserve.orchestrator.planner.candidates.planning import (
    Ledger,
    Wanted,
    changes_of,
    modelled,
    must_return,
    steps_of,
)
from banaserve.orchestrator.planner.decision import Decision, LoadMemory, PlannedMove, Situation
from banaserve.orchestrator.planner.forecasting.forecast import InstanceUse
from banaserve.orchestrator.planner.options import ElasticOptions
from banaserve.orchestrator.planner.policy import Elastic, decide, plan_of
from banaserve.sim.cluster.cluster import SimCluster
from banaserve.sim.request import SimRequest
from banaserve.sim.result import LatencyLimits, summary
from banaserve.sim.system import System
from banaserve.sim.timeline import Timeline
from banaserve_bench.simulation.run import tallied
from depth import chosen_seed, num_examples

pytestmark = pytest.mark.deep

OPT = profiles.load("opt-13b-a100")
H100 = profiles.load("llama-3.1-8b-h100")
LAYERS = Module(30, 40)


def view(
    name: str,
    role: Role,
    placements: tuple[ModulePlacement, ...] = (),
    profile: Profile = OPT,
    kv_used: float = 0.2,
) -> InstanceView:
    report = InstanceReport(0, 0, kv_used, 0.5, 0.0)
    return InstanceView(
        InstanceId(name), role, True, report, 0, 0, 1000.0, profile.facts, placements,
        step_tokens=2048,
    )  # fmt: skip


def away(host: str, guest: str, module: Module = LAYERS, held: int = 10**9) -> ModulePlacement:
    return ModulePlacement(module, InstanceId(host), InstanceId(guest), 1, 0.0, held)


def coming(rate_per_s: float, prompt: int, output: int, until_s: float) -> list[ObservedRequest]:
    draws = random.Random(chosen_seed(4))
    at_s, found = 0.0, []
    while (at_s := at_s + draws.expovariate(rate_per_s)) < until_s:
        found.append(ObservedRequest(at_s, prompt, 0, output, None, at_s + 0.5, at_s + 1))
    return found


# ---- one search


def following(profile: str, limits: tuple[float, float], **options: object) -> System:
    """One that prefills and one that decodes, and the policy."""
    system = System(
        kind="banaserve",
        prefill=1,
        decode=1,
        migration="elastic",
        history_s=300.0,
        control_s=1.0,
        overlap_fraction=None,
        attention_fraction=None,
        migration_options={
            "profile": profile,
            "ttft_s": limits[0],
            "tpot_s": limits[1],
            "margin": 0.02,  # what modules bring is less than a switch of roles may
            **options,
        },
    )
    control = replace(system.control_limits, concurrent=1000, per_minute=1000)
    return replace(system, control_limits=control)


def flood(kinds: str, duration_s: float = 60.0) -> tuple[dict[str, float], list[tuple[float, str]]]:
    """One prefills, one decodes, and what decodes has too little memory for ``duration_s``."""
    system = following(OPT.name, (3.0, 0.2), modules=kinds, roles="fixed")
    draws, at_s, rows = random.Random(chosen_seed(1)), 0.0, []
    while (at_s := at_s + draws.expovariate(6.0)) < duration_s:
        rows.append(SimRequest(len(rows), at_s, draws.randint(300, 900), draws.randint(200, 600)))
    found = tallied(OPT, system, rows)
    return summary(found, LatencyLimits(3.0, 0.2)), list(found.steps)


@pytest.mark.deep
def test_a_module_leaves_where_that_is_best_and_comes_home_when_the_load_is_light() -> None:
    without, _ = flood("none")
    served, steps = flood("layers,heads")
    assert served["goodput_fraction"] > without["goodput_fraction"] + 0.1
    assert served["total_s"] < 0.8 * without["total_s"]
    (left_s, left), (home_s, home) = steps
    assert left.startswith("move heads")
    assert home.startswith("return heads")
    assert left_s < 20 < 60 < home_s < served["total_s"]


@pytest.mark.room
def test_where_no_split_keeps_its_limits_alone_heads_of_decode_do() -> None:
    """From all-do-both: roles and heads are one plan, and nothing changes while the load lasts.

    Two that do both serve 0.33 to 0.36 of these requests within the limits, and one that prefills
    and one that decodes 0.38; changing between them brings 0.77. With heads away they work a fifth
    slower, which is to be worth it.
    """
    draws, at_s, rows = random.Random(chosen_seed(1)), 0.0, []
    while (at_s := at_s + draws.expovariate(16.1)) < 45.0:
        rows.append((at_s, draws.randint(750, 2250), draws.randint(200, 600)))
    served, steps = [], []
    for kinds in ("none", "layers,heads"):
        system = following(H100.name, (2.0, 0.025), modules=kinds, slowdown_weight=0.5)
        requests = [SimRequest(number, *row) for number, row in enumerate(rows)]
        found = tallied(H100, replace(system, colocated=2, prefill=0, decode=0), requests)
        served.append(summary(found, LatencyLimits(2.0, 0.025))["goodput_fraction"])
        steps = list(found.steps)
    assert served[1] > max(0.9, served[0] + 0.1)
    early = [words for at_s, words in steps if at_s < 45]
    assert [words.split()[0] for words in early] == ["switch", "switch", "move"]
    assert "heads" in early[2]


def test_a_kind_that_is_off_is_never_looked_at() -> None:
    _, steps = flood("layers", 20.0)
    assert all("heads" not in words for _, words in steps)


def test_a_module_never_blocks_a_better_switch_return_and_switch_are_one_plan() -> None:
    """Long prompts and short answers come to one that prefills and three that decode."""
    options = ElasticOptions(profile=H100.name, ttft_s=2.0, tpot_s=0.03)
    gone = (away("d0", "p0", Module(16, 32)),)
    views = [
        view("p0", Role.PREFILL, profile=H100),
        view("d0", Role.DECODE, gone, H100, kv_used=0.1),
        *(view(f"d{n}", Role.DECODE, profile=H100) for n in (1, 2)),
    ]
    requests = coming(4.5, 12_000, 60, 20.0)
    by_name = {one.id: one for one in views}
    cluster = ClusterView(20.0, by_name, requests=requests)
    decision = decide(Elastic(options).situation(cluster), options)
    plan = plan_of(decision, cluster, options)
    assert plan.is_ordered
    actions = [step.action for step in plan.steps]
    assert isinstance(actions[0], ReturnModule)
    assert actions[0].module == Module(16, 32)
    switched = [one.instance for one in actions if isinstance(one, SwitchRole)]
    assert "d0" in switched, decision.reason


def test_a_plan_that_is_under_way_is_not_planned_over() -> None:
    views = [view("c0", Role.COLOCATED), view("c1", Role.COLOCATED)]
    memory = LoadMemory(0.0, 4.0)
    situation = Situation(10.0, views, coming(5, 500, 50, 10.0), memory, is_changing=True)
    assert decide(situation, ElasticOptions()) == Decision(
        (), (), 0.0, memory, "a plan is under way"
    )


@pytest.mark.parametrize(("rate_per_s", "is_home"), [(0.3, True), (7.0, False), (20.0, False)])
def test_a_known_load_is_asked_whether_modules_still_pay(rate_per_s, is_home) -> None:
    """Nothing else is looked at; an overload, in which nothing brings much, changes nothing."""
    options = ElasticOptions(ttft_s=3.0, tpot_s=0.2)
    heads = Module(0, 40, tuple(range(24, 40)))
    gone = (away("d0", "p0", heads, held=27_000_000_000),)
    views = [view("p0", Role.PREFILL), view("d0", Role.DECODE, gone)]
    requests = [
        one
        if one.arrival_s < 175
        else one._replace(
            end_s=None, instance=InstanceId("d0"), output_tokens=int(16 * (200 - one.arrival_s))
        )
        for one in coming(rate_per_s, 600, 400, 200.0)
    ]
    situation = Situation(200.0, views, requests, LoadMemory(0.0, 150.0, True))
    num_looks = 0
    while num_looks < 6:
        decision = decide(situation, options)
        num_looks += 1
        assert decision.changes == ()
        assert len(decision.candidates) == 2
        assert decision.memory is not None
        assert decision.memory.next_s == 200.0 + options.recheck_s
        if decision.returns:
            break
        situation = situation._replace(memory=decision.memory._replace(next_s=150.0))
    assert [one.module for one in decision.returns] == ([heads] if is_home else [])
    assert (1 < num_looks <= 4) is is_home
    now_home = [replace(one, placements=()) for one in views]
    later = decide(situation._replace(instances=now_home), options)
    assert later.memory is not None
    assert later.memory.next_s == float("inf")


def test_a_plan_that_did_not_come_about_is_made_again() -> None:
    options = ElasticOptions(
        profile=H100.name, ttft_s=2.0, tpot_s=0.03, horizon_s=5.0, kept=2, chunks="2048"
    )
    views = [view(f"c{n}", Role.COLOCATED, profile=H100) for n in range(4)]
    requests = coming(5.0, 12_000, 100, 200.0)
    wanted = changes_of(Arrangement(3, 1, 0, 2048), views)
    memory = LoadMemory(0.0, 150.0, True, wanted)
    again = decide(Situation(200.0, views, requests, memory), options)
    assert len(again.candidates) > 2
    done = [
        replace(one, role=change.role)
        for one in views
        for change in wanted
        if change.instance == one.id
    ]
    assert len(decide(Situation(200.0, done, requests, memory), options).candidates) <= 2


# ---- plans


@st.composite
def situations(draw: st.DrawFn) -> tuple[list[InstanceView], Wanted]:
    size = draw(st.integers(2, 6))
    chunks = (512, 2048)
    every = list(arrangements(size, chunks))
    names = [InstanceId(f"i{n}") for n in range(size)]
    present = draw(st.sampled_from(every))
    roles = [Role.PREFILL] * present.num_prefill + [Role.DECODE] * present.num_decode
    roles += [Role.COLOCATED] * present.num_both
    roles = draw(st.permutations(roles))
    hosts = draw(st.lists(st.sampled_from(names), unique=True, max_size=size // 2))
    guests = [name for name in names if name not in hosts]
    gone = {
        host: (away(host, draw(st.sampled_from(guests)), LAYERS, 10**6),)
        for host in hosts
        if guests
    }
    views = [view(name, role, gone.get(name, ())) for name, role in zip(names, roles, strict=True)]
    arrangement = draw(st.sampled_from(every))
    placements = [one for each in gone.values() for one in each]
    returns = must_return(arrangement, views, placements)
    if draw(st.booleans()):
        returns = tuple(placements)
    return views, Wanted(arrangement, returns)


@settings(max_examples=num_examples(200))
@given(situations())
def test_no_step_of_a_plan_leaves_a_leg_unserved_or_a_module_behind(
    found: tuple[list[InstanceView], Wanted],
) -> None:
    views, wanted = found
    changes = changes_of(wanted.arrangement, views)
    ordered = Decision(changes, (), 0.1, None, "", wanted.returns)
    roles = {one.id: one.role for one in views}
    there = {one for each in views for one in each.placements}
    by_name = {one.id: one for one in views}
    for step in steps_of(ordered, by_name, OPT, 1.0, 60.0):
        action = step.action
        if isinstance(action, ReturnModule):
            (one,) = [p for p in there if (p.host, p.module) == (action.host, action.module)]
            there.remove(one)
        elif isinstance(action, SwitchRole):
            assert roles[action.instance] is action.old
            assert all(action.instance not in (p.host, p.guest) for p in there)
            roles[action.instance] = action.role
        else:
            assert isinstance(action, SetStepTokens)
        legs = frozenset().union(*(role.legs for role in roles.values()))
        assert legs == {Role.PREFILL, Role.DECODE}
    counts = [list(roles.values()).count(r) for r in (Role.PREFILL, Role.DECODE, Role.COLOCATED)]
    assert counts == list(wanted.arrangement[:3])


def test_a_plan_counts_memory_as_instances_do() -> None:
    timeline = Timeline()
    system = System(kind="banaserve", prefill=1, decode=1, migration="still")
    cell = SimCluster(timeline, OPT, system).cells[0]
    d0, p0 = InstanceId("d0"), InstanceId("p0")
    moves = [
        PlannedMove(d0, p0, Module(30, 40)),
        PlannedMove(d0, p0, Module(20, 30)),
    ]
    steps = steps_of(
        Decision((), (), 0.1, None, "", (), moves), cell.view().instances, OPT, 1.0, 60.0
    )
    assert all(step.cost_s > 0.2 for step in steps)
    cell.placing.begin_in_order(steps)
    assert len(cell.view().under_way) == 2
    timeline.run(until_s=10.0)
    ledger = Ledger(OPT.facts, cell.instances[d0].placements)
    for name in (d0, p0):
        assert ledger.blocks(name) == cell.instances[name].kv_blocks
    assert cell.instances[d0].kv_blocks > 1.9 * cell.instances[p0].kv_blocks
    assert cell.view().under_way == ()
    back = steps_of(
        Decision((), (), 0.1, None, "", cell.instances[d0].placements),
        cell.view().instances,
        OPT,
        1.0,
        60.0,
    )
    cell.placing.begin_in_order(back)
    timeline.run(until_s=20.0)
    assert cell.instances[d0].kv_blocks == cell.instances[p0].kv_blocks


def test_modules_of_an_engine_that_stands_for_another_take_the_memory_of_that() -> None:
    """A paced engine has the layers and heads of the modelled one, and other bytes."""
    small = replace(OPT.facts, layer_token_bytes=64, layer_weight_bytes=100, memory_bytes=10**6)
    views = [
        replace(view("d0", Role.DECODE, (away("d0", "p0", held=1000),)), facts=small),
        replace(view("p0", Role.PREFILL), facts=small),
    ]
    (host, guest) = modelled(views, OPT.facts)
    ledger = Ledger(OPT.facts, ())
    assert host.placements[0].guest_bytes == ledger.put(host.id, guest.id, LAYERS) > 10**9
    # A plan names what really is there.
    ordered = Decision((), (), 0.1, None, "", host.placements)
    (step,) = steps_of(ordered, {one.id: one for one in views}, OPT, 4.0, 60.0)
    assert step.influence == ((guest.id, Influence(guest_bytes=-1000)),)
    other = [replace(one, facts=replace(small, num_layers=12)) for one in views]
    assert modelled(other, OPT.facts)[0].placements == ()
    idle = use("p0", 0.1, 0.0, StepWork())
    asked = [use("d0", 1.0, 0.5, DECODES), idle]
    by_name = {one.id: replace(one, placements=()) for one in other}
    assert modules.candidates(("layers",), asked, by_name, (), OPT) == []


def test_steps_begin_in_their_order_and_end_with_an_instance() -> None:
    timeline = Timeline()
    system = System(kind="banaserve", prefill=2, decode=1, migration="still")
    cell = SimCluster(timeline, OPT, system).cells[0]
    p0, p1, d0 = (cell.instances[InstanceId(name)] for name in ("p0", "p1", "d0"))
    move = MoveModule(d0.id, p0.id, LAYERS, 10**9)
    felt = steps_of(
        Decision((), (), 0.1, None, "", (), [PlannedMove(d0.id, p0.id, LAYERS)]),
        cell.view().instances, OPT, 1.0, 60.0,
    )[0].influence  # fmt: skip
    steps = [
        Step(move, felt, 1.0, 0.1, 60.0),
        Step(SwitchRole(p1.id, Role.PREFILL, Role.COLOCATED), (), 0.0, 0.1, 60.0),
        Step(MoveModule(d0.id, p0.id, Module(0, 10), 10**9), felt, 1.0, 0.1, 60.0),
        Step(SwitchRole(p1.id, Role.COLOCATED, Role.DECODE), (), 0.0, 0.1, 60.0),
    ]
    cell.placing.begin_in_order(steps)
    timeline.run(until_s=0.5)
    assert p1.role is Role.PREFILL
    timeline.run(until_s=1.5)
    assert (p1.role, len(d0.placements)) == (Role.COLOCATED, 1)
    cell.kill(p0.id, None)
    timeline.run(until_s=9.0)
    assert (p1.role, d0.placements) == (Role.COLOCATED, ())
    assert cell.view().under_way == ()


# ---- the cost model's word


def use(name: str, busy: float, short: float, work: StepWork, kv: float = 0.0) -> InstanceUse:
    return InstanceUse(InstanceId(name), busy, short, kv, work)


DECODES = StepWork(0, 0, 60, 60_000)
PROMPTS = StepWork(2048, 2048**2, 0, 0)


def test_what_a_module_relieves() -> None:
    heads = Module(0, 40, tuple(range(20)))
    fraction = costs.attention_fraction(OPT, DECODES)
    step_s = modules.step_time_s(OPT, DECODES)
    assert fraction == pytest.approx(60_000 * 6.269e-7 / step_s)
    assert costs.relief(OPT, heads, DECODES) == pytest.approx(fraction / 2)
    assert costs.relief(OPT, LAYERS, StepWork(0, 0, 8, 4000)) == 0.0
    assert 0.05 < costs.relief(OPT, LAYERS, PROMPTS) < 0.25 * 0.5


def test_only_who_lacks_memory_or_time_gives_modules_to_who_has_it() -> None:
    views = {name: view(name, Role.DECODE) for name in map(InstanceId, ("a", "b"))}
    idle = use("b", 0.1, 0.0, StepWork())
    short = modules.candidates(
        ("layers",), [use("a", 1.0, 0.5, DECODES, 60_000), idle], views, (), OPT
    )
    assert {one.moves[0].host for one in short} == {"a"}
    assert all(one.moves[0].guest == "b" for one in short)
    assert short[0].bound > 0.08
    light = use("a", 0.05, 0.0, StepWork(0, 0, 2, 800))
    assert max(
        (one.bound for one in modules.candidates(modules.KINDS, [light, idle], views, (), OPT)),
        default=0.0,
    ) < 0.02  # fmt: skip
    full = use("b", 0.9, 0.0, DECODES, 60_000)
    assert (
        modules.candidates(("layers",), [use("a", 1.0, 0.5, DECODES), full], views, (), OPT) == []
    )
    gone = [away("b", "a", held=10**9)]
    assert (
        modules.candidates(("layers",), [use("a", 1.0, 0.5, DECODES), idle], views, gone, OPT) == []
    )


def bound_over(distance: Distance | None) -> float:
    """Of the best that ``a``, short of memory, can give to ``b`` on another machine."""
    a, b = map(InstanceId, "ab")
    views = {name: view(name, Role.DECODE) for name in (a, b)}
    views[a] = replace(views[a], far={b: distance})
    asked = [use("a", 1.0, 0.5, DECODES, 60_000), use("b", 0.1, 0.0, StepWork())]
    found = modules.candidates(("layers",), asked, views, (), OPT)
    return max((one.bound for one in found), default=-1.0)


def test_layers_cross_machines_where_the_way_costs_less_than_they_bring() -> None:
    quick, usual, slow = (bound_over(Distance(s, 12.5e9)) for s in (1e-6, 5e-4, 5e-2))
    assert quick > usual > slow
    assert quick > 0.08
    assert slow < ElasticOptions().margin
    assert bound_over(None) == -1.0  # nobody has measured it


def test_of_two_that_are_free_the_near_one_takes_them() -> None:
    a, b, c = map(InstanceId, "abc")
    views = {name: view(name, Role.DECODE) for name in (a, b, c)}
    views[a] = replace(views[a], far={b: Distance(5e-3, 1.25e9)})
    idle = [use(name, 0.1, 0.0, StepWork()) for name in "bc"]
    asked = [use("a", 1.0, 0.5, DECODES, 60_000), *idle]
    found = modules.candidates(("layers",), asked, views, (), OPT)
    assert {one.moves[0].guest for one in found} == {"c"}


def test_kinds_that_are_none() -> None:
    with pytest.raises(UserError, match="modules is 'rows': give layers, heads or none"):
        registry.make("elastic", modules="rows")
    assert ElasticOptions(modules="none").kinds == ()
