"""The elastic policy: arrangements, loads that change, forecasts, decisions; in virtual time."""

from __future__ import annotations

import random
import signal
import struct
import subprocess
import sys
from dataclasses import replace
from io import BytesIO
from itertools import accumulate
from math import exp, inf, log

import msgspec
import pytest

from banaserve.base.errors import UserError
from banaserve.base.types import (
    BackPressure,
    ClusterView,
    InstanceId,
    InstanceReport,
    InstanceView,
    ObservedRequest,
    Role,
    SetStepTokens,
    Step,
    SwitchRole,
)
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.move_policies import registry
from banaserve.orchestrator.planner import process as processes
from banaserve.orchestrator.planner.candidates.arrangement import (
    Arrangement,
    arrangement_of,
    arrangements,
    assign,
)
from banaserve.orchestrator.planner.candidates.planning import changes_of
from banaserve.orchestrator.planner.decision import Change, Decision, LoadMemory, Situation
from banaserve.orchestrator.planner.forecasting.forecast import (
    FutureRequest,
    ServiceLimits,
    forecast,
    future_of,
)
from banaserve.orchestrator.planner.forecasting.load_change import load_stats
from banaserve.orchestrator.planner.options import ElasticOptions
from banaserve.orchestrator.planner.policy import Elastic, decide, plan_of
from banaserve.orchestrator.planner.process import DecisionProcess
from banaserve.orchestrator.planner.search import denser, least_gain, work_doubt
from banaserve.sim.cluster.cluster import SimCluster
from banaserve.sim.instances.batch import EngineLimits
from banaserve.sim.request import SimRequest
from banaserve.sim.result import LatencyLimits, summary
from banaserve.sim.system import System
from banaserve.sim.timeline import Timeline
from banaserve_bench.simulation.run import tallied
from depth import chosen_seed, seeds

H100 = "llama-3.1-8b-h100"
NO_LIMITS = ServiceLimits()
"""The worth of a request is the logarithm of its time then, with a minus."""
HEAD = struct.pack("<I", 7)
"""Of a question of seven bytes."""


def view(name: str, role: Role, kv: float = 0.0, prefill: int = 0, tokens: int = 2048):
    report = InstanceReport(0, 0, kv, 0.0, 0.0)
    return InstanceView(
        InstanceId(name), role, True, report, 0, prefill, 1000.0, step_tokens=tokens
    )


def seen(at_s: float, output: int, ended: bool = True, instance: str = "c0") -> ObservedRequest:
    end_s = at_s + 1 if ended else None
    where = None if ended else InstanceId(instance)
    return ObservedRequest(at_s, 100, 0, output, where, at_s + 0.5, end_s)


# ---- arrangements


def test_every_arrangement_has_something_to_do_for_everybody():
    found = list(arrangements(4, (512, 2048)))
    assert len(found) == len(set(found))
    for one in found:
        assert one.size == 4
        assert one.num_prefill + one.num_both > 0
        assert one.num_decode + one.num_both > 0
        assert one.num_prefill or not one.num_decode
    assert [str(one) for one in found if one.num_prefill == 3 and one.num_decode] == [
        "3 prefill, 1 decode, 0 both, steps of 2048"
    ]


def test_many_instances_have_about_as_many_arrangements_as_eight():
    """A forecast takes longer the more instances there are, and a decision two minutes at most."""
    few = {one[:3] for one in arrangements(8, (2048,))}
    many = {one[:3] for one in arrangements(64, (2048,))}
    assert many == {tuple(8 * number for number in one) for one in few}
    for size in range(16, 130):
        found = list(arrangements(size, (2048,)))
        assert len(found) == len(set(found)) <= 80
        assert {one.size for one in found} == {size}
        assert any(one.num_both == size for one in found)
        assert any(not one.num_both for one in found)
    # Step sizes can change without roles.
    present = Arrangement(21, 30, 13, 512)
    own = [one for one in arrangements(64, (512, 2048), present) if one[:3] == present[:3]]
    assert [one.step_tokens for one in own] == [512, 2048]


@pytest.mark.parametrize("seed", seeds(20, 20))
def test_roles_are_assigned_with_as_few_changes_as_can_be(seed):
    draws = random.Random(seed)
    views = [view(f"i{n}", draws.choice(list(Role)), draws.random()) for n in range(6)]
    wanted = draws.choice(list(arrangements(6, (512,))))
    changed = assign(wanted, views)
    after = [changed.get(one.id, one.role) for one in views]
    counts = [after.count(role) for role in (Role.PREFILL, Role.DECODE, Role.COLOCATED)]
    assert counts == [wanted.num_prefill, wanted.num_decode, wanted.num_both]
    before = [one.role for one in views]
    least = sum(max(0, after.count(role) - before.count(role)) for role in Role)
    assert len(changed) == least
    assert all(changed[one.id] is not one.role for one in views if one.id in changed)


def test_who_decodes_least_begins_to_prefill():
    views = [view("d0", Role.DECODE, 0.9), view("d1", Role.DECODE, 0.1), view("p0", Role.PREFILL)]
    assert assign(Arrangement(2, 1, 0, 2048), views) == {"d1": Role.PREFILL}
    assert arrangement_of(views) == Arrangement(1, 2, 0, 2048)


# ---- load


def test_bursts_are_no_news_and_another_rate_or_length_is():
    draws = random.Random(chosen_seed(3))
    steady = [seen(draws.uniform(0, 60), 50) for _ in range(600)]
    more = [seen(draws.uniform(60, 70), 50) for _ in range(220)]
    longer = [one._replace(prompt_tokens=300) for one in steady if one.arrival_s > 50]
    before = load_stats(steady, 0, 50)
    assert not before.differs(load_stats(steady, 50, 60), 0.15, 4.5)
    assert before.differs(load_stats(more, 60, 70), 0.15, 4.5)
    assert before.differs(load_stats(longer, 50, 60), 0.15, 4.5)
    bursts = [seen(10 * draws.randrange(6) + draws.random(), 50) for _ in range(600)]
    assert not load_stats(bursts, 0, 50).differs(load_stats(bursts, 50, 60), 0.15, 4.5)


# ---- forecast


def test_unfinished_requests_get_lengths_of_those_that_went_on():
    requests = [*(seen(n, 10) for n in range(5)), *(seen(n, 100) for n in range(5, 10))]
    requests += [seen(10, 40, ended=False), seen(11, 300, ended=False), seen(12, 0, ended=False)]
    future = future_of(requests, 0.0, 13.0, 13.0, 100)
    under_way = [one for one in future if one.instance is not None]
    assert [one.generated for one in under_way] == [40, 300, 0]
    assert under_way[0].output_tokens in (100, 450)
    assert under_way[1].output_tokens == 450
    assert under_way[1].age_s == 2.0
    assert len(future) == len(under_way) + len(requests)
    twice = future_of(requests, 0.0, 13.0, 26.0, 1000)
    assert len(twice) == len(under_way) + 2 * len(requests)
    assert [one.at_s for one in twice] == sorted(one.at_s for one in twice)
    assert len(future_of(requests, 0.0, 13.0, 26.0, 20)) == len(under_way) + 20
    # A load that has lasted for no time to speak of would repeat without end.
    assert len(future_of(requests, 0.0, 13.0, inf, 20)) == len(under_way) + 20


def test_a_forecast_sees_what_a_run_of_the_same_requests_gives():
    profile = profiles.load(H100)
    draws = random.Random(chosen_seed(1))
    requests = [
        ObservedRequest(n / 20, 2000, 0, draws.randint(20, 60), None, 0.0, 100.0)
        for n in range(200)
    ]
    future = future_of(requests, 0.0, 10.0, 10.0, 1000)
    roles = [(InstanceId("a"), Role.PREFILL, 2048), (InstanceId("b"), Role.DECODE, 2048)]
    limits = ServiceLimits(0.5, 0.02)
    told = forecast(profile, System(kind="banaserve", colocated=2), roles, future, limits, 30.0)
    system = System(kind="banaserve", prefill=1, decode=1)
    rows = [SimRequest(n, one.arrival_s, 2000, one.output_tokens) for n, one in enumerate(requests)]
    ran = summary(tallied(profile, system, rows), LatencyLimits(0.5, 0.02))
    timed = forecast(profile, System(kind="banaserve", colocated=2), roles, future, NO_LIMITS, 30.0)
    ends_s = [one.at_s + exp(-worth) for one, worth in zip(future, timed.values, strict=True)]
    assert max(ends_s) == pytest.approx(ran["total_s"], rel=1e-6)
    within = sum(value > 0.5 for value in told.values) / len(told.values)
    assert within == pytest.approx(ran["goodput_fraction"], abs=0.05)


@pytest.mark.parametrize("e2e_s", [0.5, 1.0, 1.05, 20.0])
def test_without_limits_a_tenth_of_the_time_must_be_won_however_long_it_is(e2e_s: float):
    """At a second a request its worth is about nothing, and so was what a change had to bring."""
    options = ElasticOptions()
    mean = NO_LIMITS.value(0.1, 0.01, e2e_s)
    least = least_gain(mean, options)
    assert NO_LIMITS.value(0.1, 0.01, 0.95 * e2e_s) - mean < least
    assert NO_LIMITS.value(0.1, 0.01, 0.85 * e2e_s) - mean > least


def test_with_limits_the_least_gain_is_a_share_of_the_worth():
    options = ElasticOptions(ttft_s=1.0)
    assert least_gain(0.9, options) == pytest.approx(0.09)
    assert least_gain(0.0, options) == least_gain(0.2, options) == pytest.approx(0.03)


def test_worth_falls_with_time_and_margin_counts():
    limits = ServiceLimits(1.0, 0.1)
    worth = [limits.value(ttft, 0.01, 5.0) for ttft in (0.1, 0.5, 0.9, 1.1, 2.0, 50.0)]
    assert worth == sorted(worth, reverse=True)
    assert worth[0] > 0.9
    assert worth[4] < 0.2
    assert ServiceLimits().value(1.0, 0.1, 2.0) > ServiceLimits().value(1.0, 0.1, 3.0)


# ---- decisions


def elastic(**options: object) -> System:
    system = System(
        kind="banaserve",
        colocated=4,
        migration="elastic",
        history_s=300.0,
        control_s=1.0,
        migration_options={"profile": H100, **options},
    )
    limits = replace(system.control_limits, concurrent=1000, per_minute=1000)
    return replace(system, control_limits=limits)


def rows(rate_per_s: float, prompt: int, output: int, duration_s: float, first_s: float = 0.0):
    draws = random.Random(f"{rate_per_s} {prompt} {output}")
    at_s, found = first_s, []
    while (at_s := at_s + draws.expovariate(rate_per_s)) < first_s + duration_s:
        found.append((at_s, draws.randint(prompt // 2, 3 * prompt // 2), draws.randint(1, output)))
    return found


def run(system: System, load: list[tuple[float, int, int]], limits: tuple[float, float]):
    requests = [SimRequest(number, *row) for number, row in enumerate(load)]
    found = tallied(profiles.load(H100), system, requests)
    return summary(found, LatencyLimits(*limits)), found.steps


def test_routing_by_predicted_times_serves_more_within_limits_whatever_the_arrangement():
    """Most where roles are those of another load, since they are preferences."""
    load, limits = rows(13.0, 6000, 200, 60.0), (2.0, 0.03)
    slo = {"ttft_s": limits[0], "tpot_s": limits[1]}
    for roles, gain in (
        ({"colocated": 4}, 0.1),
        ({"prefill": 2, "decode": 2}, 0.6),
        ({"prefill": 1, "decode": 1, "colocated": 2}, 0.4),
        ({"prefill": 3, "decode": 1}, -0.04),
    ):
        usual, _ = run(System(kind="banaserve", **roles), load, limits)
        system = System(kind="banaserve", routing="slo_aware", routing_options=slo, **roles)
        own, _ = run(system, load, limits)
        assert own["num_finished"] == usual["num_finished"] == len(load)
        assert own["goodput_fraction"] > usual["goodput_fraction"] + gain, roles
        assert own["total_s"] < 1.15 * usual["total_s"], roles


def test_a_forecast_knows_the_lengths_of_outputs_and_routes_as_it_is_told():
    """An instance that prefills helps out with both legs by the one policy, not by the other."""
    profile, limits = profiles.load(H100), ServiceLimits(2.0, 0.03)
    requests = [seen(n / 10, 150) for n in range(100)]
    future = future_of(requests, 0.0, 10.0, 10.0, 1000)
    roles = [(InstanceId("p0"), Role.PREFILL, 2048), (InstanceId("d0"), Role.DECODE, 2048)]
    worth = {}
    for routing in ("load_aware", "slo_aware"):
        options = {"ttft_s": 2.0, "tpot_s": 0.03} if routing == "slo_aware" else {}
        system = System(kind="banaserve", colocated=2, routing=routing, routing_options=options)
        worth[routing] = forecast(profile, system, roles, future, limits, 30.0).mean
    assert worth["slo_aware"] >= worth["load_aware"]


@pytest.mark.deep
def test_it_comes_near_the_best_split_and_beats_what_it_began_with():
    load, limits = rows(5.2, 12_000, 200, 90.0), (2.0, 0.03)
    own, steps = run(elastic(ttft_s=2.0, tpot_s=0.03), load, limits)
    began, _ = run(System(kind="banaserve", colocated=4), load, limits)
    best, _ = run(System(kind="banaserve", prefill=3, decode=1), load, limits)
    assert best["goodput_fraction"] > began["goodput_fraction"] + 0.1
    assert own["goodput_fraction"] > best["goodput_fraction"] - 0.06
    assert any("to prefill" in words for _, words in steps)


@pytest.mark.deep
@pytest.mark.parametrize("rate_per_s", [2.5, pytest.param(4.5, marks=pytest.mark.room)])
def test_a_load_that_stays_the_same_is_left_alone_after_two_minutes(rate_per_s):
    load = rows(rate_per_s, 12_000, 200, 600.0)
    _, steps = run(elastic(ttft_s=2.0, tpot_s=0.03), load, (2.0, 0.03))
    assert [(at_s, words) for at_s, words in steps if 120 < at_s < 600] == []


def test_what_is_so_already_needs_no_step():
    views = {
        InstanceId(name): view(name, role, tokens=512)
        for name, role in (("c0", Role.COLOCATED), ("c1", Role.PREFILL))
    }
    requests = [seen(n / 10, 20) for n in range(100)]
    cluster = ClusterView(10.0, views, requests=requests)
    options = ElasticOptions(profile=H100, ttft_s=1.0, tpot_s=0.05)
    decision = decide(Elastic(options).situation(cluster), options)
    plan = plan_of(decision, cluster, options)
    for step in plan.steps:
        now = views[step.instances[0]]
        if isinstance(step.action, SwitchRole):
            assert step.action.role is not now.role
        else:
            assert isinstance(step.action, SetStepTokens)
            assert step.action.tokens != now.step_tokens
    assert plan.rejected
    assert isinstance(plan.memory, LoadMemory)
    nobody = decide(Situation(10.0, [], requests, None), options)
    assert nobody.changes == ()


def test_a_role_and_its_step_size_are_one_step():
    views = {
        InstanceId(name): view(name, role, tokens=512)
        for name, role in (("c0", Role.COLOCATED), ("c1", Role.COLOCATED), ("p0", Role.PREFILL))
    }
    changes = [
        Change(InstanceId("c0"), Role.PREFILL, 2048),
        Change(InstanceId("c1"), Role.COLOCATED, 1024),
        Change(InstanceId("p0"), Role.PREFILL, 512),
    ]
    decision = Decision(changes, (), 0.5, None, "")
    cluster, options = ClusterView(10.0, views), ElasticOptions(profile=H100)
    plan = plan_of(decision, cluster, options)
    assert [step.action for step in plan.steps] == [
        SwitchRole(InstanceId("c0"), Role.COLOCATED, Role.PREFILL, 2048),
        SetStepTokens(InstanceId("c1"), 512, 1024),
    ]
    # What is under way is not asked for once more.
    again = replace(cluster, under_way=plan.steps[:1])
    assert [step.action for step in plan_of(decision, again, options).steps] == [
        SetStepTokens(InstanceId("c1"), 512, 1024)
    ]


def test_a_simulated_switch_sets_the_size_of_steps_too():
    system = System(kind="banaserve", colocated=2, limits=EngineLimits(step_tokens=1536))
    (cell,) = SimCluster(Timeline(), profiles.load(H100), system).cells
    name, *_ = cell.instances

    def sizes(*actions: SwitchRole | SetStepTokens) -> list[int]:
        for action in actions:
            step = Step(action, (), 0.0, 0.0, 0.0)
            cell.placing.begin(step)
            assert step.is_finished(cell.view())
        return [one.step_tokens for one in cell.view().instances.values()]

    assert sizes(SwitchRole(name, Role.COLOCATED, Role.PREFILL, 4096)) == [4096, 1536]
    switch = SwitchRole(name, Role.PREFILL, Role.COLOCATED)
    assert sizes(switch) == [1536, 1536]
    assert not Step(replace(switch, step_tokens=512), (), 0.0, 0.0, 0.0).is_finished(cell.view())
    assert sizes(SetStepTokens(name, 1536, 512), replace(switch, role=Role.DECODE)) == [1536, 1536]


@pytest.mark.parametrize(
    ("limits", "sizes", "of_prefill"),
    [
        ({}, (512, 1024, 2048), 2048),
        ({"max_step_tokens": 1024}, (512, 1024), 1024),
        ({"max_step_tokens": 700}, (512, 700), 700),
        ({"max_step_tokens": 1500, "chunks": "512,4096,2048"}, (512, 1500), 1500),
        ({"min_step_tokens": 1024}, (1024, 2048), 2048),
        ({"min_step_tokens": 600, "max_step_tokens": 600}, (600,), 600),
    ],
)
def test_no_step_is_larger_or_smaller_than_engines_can(limits, sizes, of_prefill):
    options = ElasticOptions(profile=H100, ttft_s=1.0, tpot_s=0.05, **limits)
    assert options.step_sizes == sizes
    views = [view(f"c{n}", Role.COLOCATED, tokens=1) for n in range(2)]
    requests = [seen(n / 5, 20) for n in range(50)]
    decision = decide(Situation(10.0, views, requests, None), options)
    words = [one.candidate for one in decision.candidates]
    assert words
    assert len(words) == len(set(words))
    assert {change.step_tokens for change in decision.changes} <= {*sizes, of_prefill}
    changes = changes_of(Arrangement(1, 1, 0, sizes[-1]), views, options.feasible)
    assert [change.step_tokens for change in changes] == [of_prefill, sizes[-1]]


@pytest.mark.parametrize(("num_instances", "plans"), [(2, False), (3, True), (1, True)])
def test_it_plans_anew_where_instances_come_and_go(num_instances, plans):
    views = [view(f"c{n}", Role.COLOCATED) for n in range(num_instances)]
    requests = [seen(n, 20) for n in range(100)]
    memory = LoadMemory(0.0, float("inf"), True, num_instances=2)
    situation = Situation(100.0, views, requests, memory, num_instances=num_instances)
    decision = decide(situation, ElasticOptions(profile=H100, ttft_s=1.0, tpot_s=0.05))
    assert bool(decision.candidates) == plans
    assert decision.memory.num_instances == num_instances


def test_a_plan_without_an_instance_that_had_died_ends_when_it_is_back():
    options = ElasticOptions(profile=H100, ttft_s=1.0, tpot_s=0.05)
    views = [view(f"c{n}", Role.COLOCATED) for n in range(3)]
    requests = [seen(n, 20) for n in range(120)]
    memory = LoadMemory(0.0, 120.0, num_instances=3)

    def decided(now_s: float, num_ready: int, before: LoadMemory) -> Decision:
        situation = Situation(now_s, views[:num_ready], requests, before, num_instances=3)
        return decide(situation, options)

    without = decided(120.0, 2, memory)
    assert without.candidates
    assert without.memory.is_settled
    assert not decided(121.0, 2, without.memory).candidates
    again = decided(121.0, 3, without.memory)
    assert again.candidates
    assert not decided(122.0, 3, again.memory).candidates
    # One that dies is waited for, since it may be back before a plan is carried out.
    assert not decided(122.0, 2, again.memory).candidates


def pressed(view: InstanceView, longest_s: float) -> InstanceView:
    """The same instance while ten of its prompts wait for room in the store."""
    assert view.report is not None
    pressure = BackPressure(10, 1000, longest_s, 12, 12, 4096)
    return replace(view, report=replace(view.report, back_pressure=pressure))


def test_prefill_that_waits_for_room_in_the_store_gets_no_more_instances():
    """The forecast alone would: its store has no end, and the prompts that wait look like a flood
    of prefill."""
    options = ElasticOptions(profile=H100, ttft_s=0.5, tpot_s=0.02, roles="any")
    views = [view("p0", Role.PREFILL), *(view(f"d{n}", Role.DECODE) for n in range(3))]
    long = {"prompt_tokens": 8000, "output_tokens": 100}
    requests = [seen(n / 8, 100)._replace(**long) for n in range(400)]
    requests += [seen(49.9, 0, ended=False, instance="p0")._replace(**long) for n in range(40)]
    memory = LoadMemory(0.0, 50.0, num_instances=4)

    def planned(now: list[InstanceView]) -> Decision:
        return decide(Situation(50.0, now, requests, memory, num_instances=4), options)

    def num_prefill(decision: Decision) -> int:
        chosen = {change.instance: change.role for change in decision.changes}
        return sum(chosen.get(one.id, one.role) is Role.PREFILL for one in views)

    free, waiting = planned(views), planned([pressed(views[0], 5.0), *views[1:]])
    assert num_prefill(free) > 1
    assert num_prefill(waiting) <= 1
    words = [one.candidate for one in waiting.candidates]
    assert not any(line.startswith(("2 prefill", "3 prefill")) for line in words)


@pytest.mark.parametrize(
    ("longest_s", "is_pressed", "plans"), [(0.1, False, 0), (9.0, False, 1), (9.0, True, 0)]
)
def test_it_plans_anew_once_where_prefill_waits_for_room(longest_s, is_pressed, plans):
    views = [pressed(view("p0", Role.PREFILL), longest_s), view("d0", Role.DECODE)]
    requests = [seen(n, 20) for n in range(100)]
    memory = LoadMemory(0.0, float("inf"), True, num_instances=2, is_pressed=is_pressed)
    situation = Situation(100.0, views, requests, memory, num_instances=2)
    decision = decide(situation, ElasticOptions(profile=H100, ttft_s=1.0, tpot_s=0.05))
    assert bool(decision.candidates) == plans
    assert decision.memory.is_pressed == (is_pressed or bool(plans))


@pytest.mark.parametrize(("num_requests", "are_screened"), [(100, False), (300, True)])
def test_many_arrangements_of_few_requests_are_screened_too(
    num_requests: int, are_screened: bool
) -> None:
    """Of eight instances there are 94 arrangements; each costs seconds over all requests."""
    views = [view(f"c{n}", Role.COLOCATED) for n in range(8)]
    requests = [seen(n * 40 / num_requests, 20) for n in range(num_requests)]
    options = ElasticOptions(profile=H100, ttft_s=1.0, tpot_s=0.05)
    found = decide(Situation(40.0, views, requests, LoadMemory(0.0, 40.0)), options).candidates
    assert (len(found) == options.kept + 1) == are_screened


async def test_a_decision_is_the_same_in_a_process_of_its_own():
    views = [view(f"c{n}", Role.COLOCATED) for n in range(2)]
    requests = [seen(n / 10, 20, ended=n < 90) for n in range(100)]
    situation = Situation(10.0, views, requests, LoadMemory(0.0, 4.0))
    options = ElasticOptions(profile=H100, ttft_s=1.0, tpot_s=0.05)
    process = DecisionProcess()
    try:
        first = await process.decide(situation, options)
        again = await process.decide(situation, options)
    finally:
        await process.stop()
    here = decide(situation, options)
    assert first == again
    assert list(first.candidates) == list(here.candidates)
    assert (first.reason, first.gain, first.memory) == (here.reason, here.gain, here.memory)


@pytest.mark.parametrize("rest", [b"", HEAD[:2], HEAD, HEAD + b"half"])
def test_half_a_message_ends_the_process_quietly(rest):
    options = ElasticOptions(profile=H100)
    body = msgspec.msgpack.encode((Situation(10.0, (), (), None), options))
    answers = BytesIO()
    processes.serve(BytesIO(struct.pack("<I", len(body)) + body + rest), answers)
    (size,) = struct.unpack("<I", answers.getvalue()[:4])
    assert len(answers.getvalue()) == 4 + size  # one answer, and nothing behind it


@pytest.mark.parametrize(
    ("asked", "code", "said"),
    [
        (HEAD + b"half", 0, ""),
        (b"\xff\xff\xff\xff", 1, "a message of 4294967295 bytes "),
    ],
)
def test_the_process_says_a_line_at_most(asked, code, said):
    argv = [sys.executable, "-P", "-m", "banaserve.orchestrator.planner.process"]
    ended = subprocess.run(argv, input=asked, capture_output=True, timeout=60, check=False)
    assert (ended.returncode, ended.stdout) == (code, b"")
    lines = ended.stderr.decode().splitlines()
    assert len(lines) == bool(said)
    assert "".join(lines).startswith(said)


def test_ctrl_c_in_the_servers_terminal_is_not_for_the_process():
    body = msgspec.msgpack.encode((Situation(10.0, (), (), None), ElasticOptions(profile=H100)))
    argv = [sys.executable, "-P", "-m", "banaserve.orchestrator.planner.process"]
    pipe = subprocess.PIPE
    with subprocess.Popen(argv, stdin=pipe, stdout=pipe, stderr=pipe) as process:
        process.stdin.write(struct.pack("<I", len(body)) + body)
        process.stdin.flush()
        assert len(process.stdout.read(4)) == 4  # it has begun
        process.send_signal(signal.SIGINT)
        assert (process.communicate(timeout=60)[1], process.returncode) == (b"", 0)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"ttft_s": -1.0}, "ttft_s is -1.0: give 0 or more"),
        ({"chunks": "many"}, "chunks is 'many': give numbers of tokens"),
        ({"roles": "some"}, "roles is 'some': give any or fixed"),
        ({"routing": "slo_awar"}, "slo_aware"),
        ({"window_s": 0.0}, "window_s is 0.0: give more than 0"),
        ({"horizon_s": 0.0}, "horizon_s is 0.0: give more than 0"),
        ({"margin": float("nan")}, "margin takes a number: got nan"),
        ({"chunks": "0,512", "min_step_tokens": 64}, "chunks is '0,512'"),
        ({"max_step_tokens": -1}, "max_step_tokens is -1: give 0 or more"),
        ({"min_step_tokens": 64, "max_step_tokens": 32}, "max_step_tokens is 32: give at least"),
    ],
)
def test_options_that_make_no_sense(options, words):
    with pytest.raises(UserError, match=words):
        registry.make("elastic", **options)


@pytest.mark.parametrize(
    ("num", "variation", "doubt"), [(100, 0.0, 0.0), (100, 1.0, 0.1), (4, 1.0, 0.3)]
)
def test_how_far_off_the_work_may_be(num: int, variation: float, doubt: float) -> None:
    """Gaps of two lengths, as often one as the other, whose deviation is so many means."""
    gaps = [1.0 + (variation if n % 2 else -variation) for n in range(num)]
    arrivals_s = list(accumulate(gaps, initial=5.0))
    assert work_doubt(arrivals_s, [100] * len(arrivals_s)) == pytest.approx(doubt)
    assert work_doubt([1.0, 1.0], [5, 5]) == work_doubt([], []) == 0.3


def test_lengths_that_differ_add_to_the_doubt() -> None:
    arrivals_s = [float(n) for n in range(101)]
    lengths = [50, 150] * 50
    assert work_doubt(arrivals_s, lengths) == pytest.approx(0.05)


def test_a_denser_future_is_the_same_in_less_time() -> None:
    future = [FutureRequest(0.0, 10, 0, 5, generated=2), FutureRequest(6.0, 20, 0, 7)]
    assert denser(future, 0.2) == [future[0], future[1]._replace(at_s=5.0)]


def test_a_gain_that_a_little_more_load_turns_into_a_loss_changes_nothing() -> None:
    """Code completion just below saturation: split roles keep up here, and not at 12% more."""
    draws, arrivals_s = random.Random(2), [0.0]
    requests: list[ObservedRequest] = []
    while (at_s := arrivals_s[-1] + draws.expovariate(46)) <= 4.0:
        arrivals_s.append(at_s)
        prompt, output = (int(draws.lognormvariate(log(mean) - 0.18, 0.6)) for mean in (2000, 30))
        requests.append(
            ObservedRequest(at_s, max(16, prompt), 0, max(2, output), None, at_s + 0.2, at_s + 1)
        )
    views = [view(f"c{n}", Role.COLOCATED, 0.1) for n in range(4)]
    situation = Situation(4.0, views, requests, LoadMemory(0.0, 4.0), num_instances=4)
    options = ElasticOptions(
        profile=H100, ttft_s=1.0, tpot_s=0.02, routing="slo_aware", chunks="2048"
    )
    found = decide(situation, options)
    assert found.changes == ()
    assert found.gain > 0.1
    assert found.reason.endswith("would lose more with a little more load")
