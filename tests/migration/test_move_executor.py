"""Steps of plans become migrations and role switches, over instances without engines."""

from __future__ import annotations

import asyncio
import itertools
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")


import executor_doubles as doubles
from banaserve.base.errors import MigrationError, NoAnswerError, UserError
from banaserve.base.types import (
    InstanceId,
    Module,
    MoveModule,
    ObservedRequest,
    ReturnModule,
    Role,
    Step,
    SwitchRole,
)
from banaserve.contracts.instances import Ending
from banaserve.contracts.migration_api import MoveHeads, MoveLayers, Return
from banaserve.migration.units.heads import HeadSet
from banaserve.migration.units.layers import LayerRange
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.model.learnt_time import EASED_AFTER_S
from banaserve.orchestrator.control.move_policies.options import RepairedOptions
from banaserve.serving.operations import executor as executors
from banaserve.serving.operations.executor import ask_of, instance_facts, with_device
from depth import seeds
from waiting import until

World = doubles.World
CONFIG = doubles.CONFIG
FACTS = doubles.FACTS
D0, P0, P1 = InstanceId("d0"), InstanceId("p0"), InstanceId("p1")
LAYERS = MoveModule(D0, P0, Module(10, 20), 1000)
HEADS = MoveModule(D0, P0, Module(0, 30, (1, 2)), 1000)


def step(action: Any, timeout_s: float = 20.0) -> Step:
    return Step(action, (), 1.0, 2.0, timeout_s)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    made = World(tmp_path)
    made.overseer.start()
    await made.executor.discover()
    yield made
    await made.roles.stop()
    await made.overseer.stop()
    await made.cluster.close()


# ---- words


@pytest.mark.parametrize(
    ("action", "ask"),
    [
        (LAYERS, MoveLayers("d0", "p0", (10, 20))),
        (replace(LAYERS, module=Module(4, 6, (1,))), MoveHeads("d0", "p0", {4: (1,), 5: (1,)})),
        (ReturnModule(D0, P0, Module(10, 20), 0), Return("d0", layers=(10, 20))),
        (ReturnModule(D0, P0, Module(4, 5, (0, 2)), 0), Return("d0", heads={4: (0, 2)})),
    ],
)
def test_what_the_coordinator_is_asked(action, ask):
    assert ask_of(action) == ask


@pytest.mark.parametrize(
    ("modules", "expected"),
    [
        (LayerRange(3, 9), [Module(3, 9)]),
        (HeadSet(dict.fromkeys(range(30), (1, 2))), [Module(0, 30, (1, 2))]),
        (
            HeadSet({2: (1,), 3: (1,), 4: (0,), 7: (0,)}),
            [Module(2, 4, (1,)), Module(4, 5, (0,)), Module(7, 8, (0,))],
        ),
    ],
)
def test_neighbouring_layers_with_equal_heads_are_one_module(modules, expected):
    assert modules.as_modules() == expected


# ---- what is seen


def test_facts_of_an_engine():
    facts = instance_facts(CONFIG, FACTS, 2.0, True)
    assert facts is not None
    assert (facts.layer_token_bytes, facts.hidden_bytes, facts.queries_a_head) == (1536, 2304, 3)
    assert (facts.kv_bytes, facts.max_kv_blocks) == (300 * 16 * 1536 * 30, 600)
    assert (facts.can_move_heads, facts.can_switch_role) == (True, True)
    empty = SimpleNamespace(
        **{**vars(CONFIG), "cache_config": SimpleNamespace(num_gpu_blocks=0, block_size=16)}
    )
    assert instance_facts(empty, FACTS, 2.0, True) is None


def test_facts_of_an_engine_of_two_ranks():
    ranks = SimpleNamespace(tensor_parallel_size=2)
    two = SimpleNamespace(**{**vars(CONFIG), "parallel_config": ranks})
    one, facts = instance_facts(CONFIG, FACTS, 2.0, True), instance_facts(two, FACTS, 2.0, True)
    # Each has as many KV heads as the only one of the other engine.
    assert facts.layer_token_bytes == 2 * one.layer_token_bytes
    assert facts.kv_bytes == 2 * one.kv_bytes
    assert (facts.can_move_layers, facts.can_move_heads) == (True, False)


def test_a_modelled_device_is_a_fact_of_its_instance_alone(tmp_path):
    text = (profiles.BUILT_IN / "opt-13b-a100.toml").read_text()
    slow = tmp_path / "slow.toml"
    slow.write_text(text.replace("fixed_s = 19.93e-3", "fixed_s = 79.72e-3"))
    pacing = {"profile": "opt-13b-a100", "folder": "", "devices": {"d1": str(slow)}}
    config = SimpleNamespace(**{**vars(CONFIG), "additional_config": {"banaserve_pacing": pacing}})
    usual = instance_facts(config, FACTS, 2.0, True)
    assert with_device(usual, config, InstanceId("d0")) == usual
    assert with_device(usual, CONFIG, InstanceId("d1")) == usual
    own = with_device(usual, config, InstanceId("d1"))
    assert (own.profile, 0.3 < own.speed < 0.9) == (str(slow), True)
    assert replace(own, profile="", speed=1.0) == usual


async def test_who_cannot_migrate_may_still_switch_roles(world):
    views = world.executor.view().instances
    assert views[D0].facts.can_move_layers
    assert not views[InstanceId("x0")].facts.can_move_layers
    assert views[InstanceId("x0")].facts.can_switch_role
    world.instances[D0].die()
    assert world.executor.view().instances[D0].facts is None


# ---- moves


async def test_a_module_goes_and_comes_home(world):
    first = world.executor.link()
    outcome = await world.executor.carry_out(step(LAYERS))
    assert (outcome.ending, outcome.reason, outcome.blocks_gained) == (Ending.DONE, "", 150)
    assert outcome.stall_s == 0.004
    await until(lambda: world.instances[D0].placements)
    seen = world.executor.view()
    (placement,) = seen.instances[D0].placements
    assert (placement.module, placement.guest) == (LAYERS.module, P0)
    assert step(LAYERS).is_finished(seen)
    assert seen.instances[D0].report.num_kv_blocks == 450
    assert [world.instances[n].num_changes for n in (D0, P0, P1)] == [1, 1, 0]
    # The move, however long, has taught it what a migration takes.
    assert world.executor.link().sync_s != first.sync_s
    assert world.executor.link().hop_s == first.hop_s
    world.instances[D0].board.meter.call_s = 0.01
    assert world.executor.link().hop_s == 0.005
    back = await world.executor.carry_out(step(ReturnModule(D0, P0, LAYERS.module, 0)))
    assert (back.ending, back.blocks_gained) == (Ending.DONE, -150)


async def test_heads_of_all_layers_are_one_placement_that_can_come_home(world):
    assert (await world.executor.carry_out(step(HEADS))).ending is Ending.DONE
    await until(lambda: world.instances[D0].placements)
    (placement,) = world.instances[D0].placements
    assert placement.module == HEADS.module
    back = ReturnModule(D0, P0, placement.module, 0)
    assert (await world.executor.carry_out(step(back))).ending is Ending.DONE


async def test_a_refused_step_says_why(world):
    outcome = await world.executor.carry_out(step(replace(LAYERS, host=InstanceId("x0"))))
    assert (outcome.ending, outcome.reason) == (Ending.REFUSED, "MLA cannot be moved")
    assert world.instances[P0].num_changes == 0


async def test_a_step_over_its_time_is_aborted(world):
    world.engine.held = {"preparing"}
    outcome = await world.executor.carry_out(step(LAYERS, timeout_s=0.1))
    assert (outcome.ending, outcome.reverted) == (Ending.TIMED_OUT, False)
    assert "not done in 0 s" in outcome.reason
    assert world.engine.units == {}


class Once(dict[str, str]):
    """Each fault shows once."""

    def get(self, name: str, default: Any = None) -> Any:
        return self.pop(name, default)


async def test_what_failed_behind_its_commit_is_taken_back(world):
    world.engine.faults = Once(free="the pages stay")
    outcome = await world.executor.carry_out(step(LAYERS))
    assert (outcome.ending, outcome.reverted) == (Ending.FAILED, True)
    assert "the pages stay" in outcome.reason
    assert world.engine.units == {}
    assert world.instances[P0].num_changes == 1


async def test_a_cancelled_step_is_aborted(world):
    world.engine.held = {"preparing"}
    carrying = asyncio.create_task(world.executor.carry_out(step(LAYERS)))
    await until(lambda: "prepare" in world.engine.calls)
    assert [one.action for one in world.executor.view().under_way] == [LAYERS]
    carrying.cancel()
    await asyncio.gather(carrying, return_exceptions=True)
    await until(lambda: not any(m.is_open for m in world.cluster.coordinator.recent()))
    assert world.executor.view().under_way == ()
    assert world.engine.units == {}


async def test_requests_are_in_the_view_where_the_policy_looks_at_them(world):
    assert world.executor.view().requests == ()
    request, asked = ObservedRequest(1.0, 5, 0, 0, None, None, None), []
    looking = executors.MoveExecutor(
        world.served,
        world.cluster.coordinator,
        world.roles,
        SimpleNamespace(now=lambda: 1000.0),
        2.0,
        lambda since_s: asked.append(since_s) or [request],
    )
    assert looking.view().requests == [request]
    assert asked == [700.0]


async def test_what_people_move_keeps_its_instances_busy(world):
    world.engine.held = {"preparing"}
    migration = await world.cluster.coordinator.begin(MoveLayers("d0", "p0", (1, 3)))
    (seen,) = world.executor.view().under_way
    assert (seen.instances, seen.influence) == ((D0, P0), ())
    assert seen.action.module == Module(1, 3)
    world.cluster.coordinator.abort(migration.id)
    await world.cluster.coordinator.wait(migration.id)


# ---- roles


async def test_a_role_changes_when_nothing_is_left(world):
    p1 = world.instances[P1]
    p1.inflight_requests = 2
    switching = asyncio.create_task(
        world.executor.carry_out(step(SwitchRole(P1, Role.PREFILL, Role.DECODE)))
    )
    await until(lambda: not p1.takes_requests)
    assert not world.executor.view().instances[P1].ready
    assert len(world.executor.view().under_way) == 1
    assert p1.role is Role.PREFILL
    p1.inflight_requests = 0
    assert (await switching).ending is Ending.DONE
    assert (p1.role, p1.service.is_switching, p1.num_changes) == (Role.DECODE, False, 1)
    (change,) = world.roles.recent()
    assert (change.state, change.old, change.role) == ("done", "prefill", "decode")


async def test_one_that_does_both_drains_nothing_and_lets_the_last_of_a_role_go(world):
    d0, p0 = InstanceId("d0"), InstanceId("p0")
    for name, one in world.instances.items():
        one.role = Role.DECODE if name != p0 else Role.PREFILL
    world.instances[p0].inflight_requests = 7
    with pytest.raises(MigrationError, match="the only one that serves prefill"):
        world.roles.begin("p0", "decode", 20.0)
    change = await world.roles.wait(world.roles.begin("p0", "both", 20.0).id)
    assert (change.state, change.num_left, world.instances[p0].role) == ("done", 7, Role.COLOCATED)
    with pytest.raises(MigrationError, match="p0 does both already"):
        world.roles.begin("p0", "colocated", 20.0)
    change = await world.roles.wait(world.roles.begin("d0", "both", 20.0).id)
    assert change.state == "done"
    world.instances[p0].inflight_requests = 0
    change = await world.roles.wait(world.roles.begin("p0", "decode", 20.0).id)
    assert (change.state, world.instances[d0].role) == ("done", Role.COLOCATED)


async def test_a_step_size_changes_alone_and_with_a_role(world):
    d0 = world.instances[InstanceId("d0")]
    d0.inflight_requests = 3
    change = world.roles.begin("d0", d0.role.value, 20.0, step_tokens=512)
    assert d0.takes_requests
    assert (await world.roles.wait(change.id)).state == "done"
    assert (d0.role, d0.step_tokens) == (Role.DECODE, 512)
    with pytest.raises(MigrationError, match="for decode already"):
        world.roles.begin("d0", "decode", 20.0, step_tokens=512)
    await world.roles.wait(world.roles.begin("d0", "both", 20.0, step_tokens=1024).id)
    assert (d0.role, d0.step_tokens) == (Role.COLOCATED, 1024)
    await world.roles.wait(world.roles.begin("d0", "both", 20.0).id)
    assert d0.step_tokens == 0


async def test_a_switch_that_takes_too_long_leaves_the_role(world):
    p1 = world.instances[P1]
    p1.inflight_requests = 3
    outcome = await world.executor.carry_out(
        step(SwitchRole(P1, Role.PREFILL, Role.DECODE), timeout_s=0.05)
    )
    assert outcome.ending is Ending.TIMED_OUT
    assert "3 requests are left" in outcome.reason
    assert (p1.role, p1.service.is_switching, p1.num_changes) == (Role.PREFILL, False, 0)


async def test_a_switch_drains_as_long_as_it_may_cost(world):
    p1 = world.instances[P1]
    p1.inflight_requests = 3
    switch = replace(step(SwitchRole(P1, Role.PREFILL, Role.DECODE)), cost_s=0.05)
    assert (await world.executor.carry_out(switch)).ending is Ending.DONE
    assert (p1.role, p1.service.is_switching, p1.inflight_requests) == (Role.DECODE, False, 3)
    (change,) = world.roles.recent()
    assert (change.state, change.num_left) == ("done", 3)


async def test_a_switch_brings_the_size_of_its_steps(world):
    p1 = world.instances[P1]
    switch = step(SwitchRole(P1, Role.PREFILL, Role.DECODE, 512))
    assert (await world.executor.carry_out(switch)).ending is Ending.DONE
    assert (p1.role, p1.budget, p1.step_tokens) == (Role.DECODE, Role.DECODE, 512)
    assert switch.is_finished(world.executor.view())
    p1.step_tokens = 256
    assert not switch.is_finished(world.executor.view())
    back = step(SwitchRole(P1, Role.DECODE, Role.PREFILL))
    assert (await world.executor.carry_out(back)).ending is Ending.DONE
    assert (p1.role, p1.step_tokens) == (Role.PREFILL, 0)
    assert back.is_finished(world.executor.view())


async def test_all_switches_of_a_plan_are_done_side_by_side(world):
    answers = asyncio.Event()
    for one in world.instances.values():
        one.role, one.inflight_requests = Role.COLOCATED, 3
        one.take_budget = _after(answers.wait, one.take_budget)
    roles = (Role.PREFILL, Role.PREFILL, Role.DECODE, Role.DECODE)
    steps = [
        replace(step(SwitchRole(name, Role.COLOCATED, role, 2048)), cost_s=0.0)
        for name, role in zip(world.instances, roles, strict=True)
    ]
    carrying = asyncio.gather(*(world.executor.carry_out(one) for one in steps))
    await until(lambda: len(world.roles.recent()) == 4)
    # They may serve until they have their roles: nobody drains.
    assert all(view.ready for view in world.executor.view().instances.values())
    answers.set()
    assert [outcome.ending for outcome in await carrying] == [Ending.DONE] * 4
    assert [one.role for one in world.instances.values()] == list(roles)
    assert {one.step_tokens for one in world.instances.values()} == {2048}


@pytest.mark.parametrize("drain_s", [0.0, 60.0])
async def test_who_is_to_leave_a_leg_does_not_count_for_it(world, drain_s):
    for one in world.instances.values():
        one.role, one.inflight_requests = Role.COLOCATED, 1
    begun = [world.roles.begin(n, "prefill", 60, drain_s) for n in ("d0", "p0", "p1")]
    with pytest.raises(MigrationError, match="only one that serves decode"):
        world.roles.begin("x0", "prefill", 60, drain_s)
    for one in world.instances.values():
        one.inflight_requests = 0
    assert [(await world.roles.wait(one.id)).state for one in begun] == ["done"] * 3


@pytest.mark.parametrize("drains_s", [(0.0,), (0.0, 60.0)])
@pytest.mark.parametrize("seed", seeds(4, 4))
async def test_switches_side_by_side_leave_no_leg_to_nobody(world, seed, drains_s):
    draws, endings, alone = random.Random(seed), set(), []
    instances = list(world.instances.values())
    for one, role in zip(instances, draws.choice(COVERED), strict=True):
        one.role = role
        one.take_budget = _after(_pausing(draws), one.take_budget)
        one.set_role = _checking(instances, one, alone)

    async def switch(name: str) -> None:
        await _pausing(draws)()
        role = draws.choice(("prefill", "decode", "both"))
        try:
            change = world.roles.begin(name, role, 60, draws.choice(drains_s))
        except MigrationError:
            return
        endings.add((await world.roles.wait(change.id)).state)

    for _ in range(100):
        await asyncio.gather(*(switch(one.id) for one in instances))
    assert alone == []
    # One that drains serves nothing meanwhile, for which another's switch is given up.
    assert endings == {"done"} if drains_s == (0.0,) else {"done", "failed"}


def _covers(roles: Any) -> bool:
    return frozenset().union(*(role.legs for role in roles)) == Role.COLOCATED.legs


COVERED = [roles for roles in itertools.product(Role, repeat=4) if _covers(roles)]


def _pausing(draws: random.Random) -> Any:
    async def pause() -> None:
        for _ in range(draws.randrange(4)):
            await asyncio.sleep(0)

    return pause


def _after(pause: Any, take_budget: Any) -> Any:
    async def late(role: Role, step_tokens: int = 0) -> None:
        await pause()
        await take_budget(role, step_tokens)

    return late


def _checking(instances: Any, own: Any, alone: list[Any]) -> Any:
    set_role = own.set_role

    def checked(role: Role) -> None:
        set_role(role)
        serving = [one.role for one in instances if one is own or one.takes_requests]
        if not _covers(serving):
            alone.append(serving)

    return checked


async def test_a_switch_by_hand_and_its_abort(world):
    world.instances[P1].inflight_requests = 1
    change = world.roles.begin("p1", "decode", 60)
    assert len(world.executor.view().under_way) == 1
    world.roles.abort(change.id)
    assert (await world.roles.wait(change.id)).state == "aborted"
    assert world.instances[P1].role is Role.PREFILL
    with pytest.raises(MigrationError, match="nothing to abort"):
        world.roles.abort(change.id)


@pytest.mark.parametrize("ends", [P1, P0])
@pytest.mark.parametrize("left", [0, 1])  # what an instance had ends with it
async def test_a_death_ends_a_switch(world, ends, left):
    world.instances[P1].inflight_requests = 1
    change = world.roles.begin("p1", "decode", 60)
    world.instances[ends].die()
    world.instances[P1].inflight_requests = left
    assert (await world.roles.wait(change.id)).state == "failed"
    assert (world.instances[P1].role, world.instances[P1].service.is_switching) == (
        Role.PREFILL,
        False,
    )


async def test_switches_that_cannot_be(world):
    for name, role, error, said in [
        ("q0", "decode", UserError, "unknown instance: q0"),
        ("p1", "either", UserError, "unknown role: either"),
        ("p1", "prefill", MigrationError, "for prefill already"),
    ]:
        with pytest.raises(error, match=said):
            world.roles.begin(name, role, 1.0)
    with pytest.raises(UserError, match="more than 0"):
        world.roles.begin("p1", "decode", 0)
    world.instances[P0].inflight_requests = 1
    world.roles.begin("p0", "decode", 60)
    with pytest.raises(MigrationError, match="only one that serves prefill"):
        world.roles.begin("p1", "decode", 1.0)
    with pytest.raises(MigrationError, match="already"):
        world.roles.begin("p0", "decode", 1.0)
    world.instances[P1].role = Role.COLOCATED
    with pytest.raises(MigrationError, match="only one that serves prefill"):
        world.roles.begin("p1", "decode", 1.0)
    with pytest.raises(MigrationError, match="p1 does both already"):
        world.roles.begin("p1", "both", 1.0)


async def test_whatever_goes_wrong_in_a_switch_ends_it(world, monkeypatch):
    def broken(role: Role) -> None:
        raise RuntimeError("no such role here")

    monkeypatch.setattr(world.instances[P1], "set_role", broken)
    outcome = await world.executor.carry_out(step(SwitchRole(P1, Role.PREFILL, Role.DECODE)))
    assert (outcome.ending, outcome.reason) == (Ending.FAILED, "RuntimeError: no such role here")
    assert world.executor.view().under_way == ()
    assert (world.instances[P1].role, world.instances[P1].service.is_switching) == (
        Role.PREFILL,
        False,
    )


async def test_the_engine_takes_the_budget_of_its_role(world, monkeypatch):
    p1 = world.instances[P1]
    switch = step(SwitchRole(P1, Role.PREFILL, Role.DECODE))
    assert (await world.executor.carry_out(switch)).ending is Ending.DONE
    assert (p1.role, p1.budget) == (Role.DECODE, Role.DECODE)
    back = step(SwitchRole(P1, Role.DECODE, Role.PREFILL))
    given = []

    async def late(role: Role, step_tokens: int = 0) -> None:
        given.append(role)
        if role is Role.PREFILL:
            raise NoAnswerError("the engine has not taken its budget in 30 s")

    monkeypatch.setattr(p1, "take_budget", late)
    outcome = await world.executor.carry_out(back)
    assert (outcome.ending, outcome.reason.partition(": ")[0]) == (Ending.FAILED, "NoAnswerError")
    # The one that answered too late must not go on with the budget of a role that it has not.
    assert (p1.role, given) == (Role.DECODE, [Role.PREFILL, Role.DECODE])


@pytest.mark.parametrize("role", ["decode", "prefill"])
async def test_a_switch_that_is_given_up_while_the_engine_answers_changes_nothing(world, role):
    p1, asked, answers = world.instances[P1], asyncio.Event(), asyncio.Event()
    take_budget = p1.take_budget

    async def slow(role: Role, step_tokens: int = 0) -> None:
        asked.set()
        await answers.wait()
        await take_budget(role, step_tokens)

    p1.take_budget = slow
    change = world.roles.begin("p1", role, 60, step_tokens=512)
    await asked.wait()
    world.roles.abort(change.id)
    answers.set()
    assert (await world.roles.wait(change.id)).state == "aborted"
    assert (p1.role, p1.budget, p1.service.is_switching) == (Role.PREFILL, Role.PREFILL, False)
    assert p1.step_tokens == 0


# ---- what is asked again, and what is forgotten


async def test_a_host_that_did_not_answer_in_time_is_asked_again(tmp_path, monkeypatch):
    fresh = World(tmp_path / "fresh")
    executor, host = fresh.executor, fresh.cluster.coordinator.hosts[D0]
    answers = [NoAnswerError("instance d0 has not answered status in 30 s")]
    ask = host.refresh

    async def refresh(memory: bool = False) -> Any:
        if answers:
            raise answers.pop()
        return await ask(memory)

    monkeypatch.setattr(host, "refresh", refresh)
    await executor.discover()
    facts = executor.view().instances[D0].facts
    assert facts is not None
    assert not facts.can_move_layers
    await until(lambda: executor.view().instances[D0].facts.can_move_layers)
    # One that says that it cannot is taken at its word.
    assert not executor.view().instances[InstanceId("x0")].facts.can_move_layers


async def test_one_slow_move_does_not_forbid_all_others(world, monkeypatch):
    monkeypatch.setattr(executors, "seconds_of", lambda _: 40.0)
    assert (await world.executor.carry_out(step(LAYERS))).ending is Ending.DONE
    budget_s = RepairedOptions().migration_budget_s
    world.executor.view()
    assert world.executor.link().sync_s > budget_s
    now_s = world.executor.clock.now()
    clock = SimpleNamespace(now=lambda: now_s + 20 * EASED_AFTER_S)
    monkeypatch.setattr(world.executor, "clock", clock)
    assert world.executor.link().sync_s < budget_s / 2


async def test_what_overlap_would_bring_is_in_the_view_where_steps_may_be_cut(world):
    async def told() -> float | None:
        await world.executor.discover()
        return world.executor.view().instances[D0].report.overlap_fraction

    assert await told() is None, "it waits for its guests"
    world.engine.overlap["max_microbatches"] = 8
    assert await told() == 8.0, "whatever its meter says"
    world.cluster.coordinator.hosts[D0].ended()
    assert world.executor.view().instances[D0].report.overlap_fraction is None
    await until(lambda: world.executor.view().instances[D0].report.overlap_fraction == 8.0)
    world.engine.overlap["blocker"] = "its tokens look at later ones"
    assert await told() is None
