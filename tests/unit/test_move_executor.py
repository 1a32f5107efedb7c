"""Steps of plans become migrations and role switches, over instances without engines."""

from __future__ import annotations

import asyncio
import importlib.util
import sys
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")


from banaserve.engine.interface import Ending
from banaserve.engine.vllm.facts import instance_facts
from banaserve.engine.vllm.migration.modules import HeadSet, LayerRange
from banaserve.engine.vllm.moves.asking import ask_of, modules_of
from banaserve.engine.vllm.moves.words import MoveHeads, MoveLayers, Return
from banaserve.errors import MigrationError, UserError
from banaserve.types import (
    InstanceId,
    Module,
    MoveModule,
    ReturnModule,
    Role,
    Step,
    SwitchRole,
)

_path = Path(__file__).parent / "executor_doubles.py"
_spec = importlib.util.spec_from_file_location("executor_doubles", _path)
assert _spec is not None
assert _spec.loader is not None
doubles: Any = importlib.util.module_from_spec(_spec)
sys.modules["executor_doubles"] = doubles
_spec.loader.exec_module(doubles)

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


async def until(holds: Any) -> None:
    async with asyncio.timeout(20):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


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
    assert modules_of(modules) == expected


# ---- what is seen


def test_facts_of_an_engine():
    facts = instance_facts(CONFIG, FACTS, 2.0, True, False)  # type: ignore[arg-type]
    assert facts is not None
    assert (facts.layer_token_bytes, facts.hidden_bytes, facts.queries_a_head) == (1536, 2304, 3)
    assert (facts.kv_bytes, facts.max_kv_blocks) == (300 * 16 * 1536 * 30, 600)
    assert (facts.can_move_heads, facts.can_switch_role) == (True, False)
    empty = SimpleNamespace(
        **{**vars(CONFIG), "cache_config": SimpleNamespace(num_gpu_blocks=0, block_size=16)}
    )
    assert instance_facts(empty, FACTS, 2.0, True, True) is None  # type: ignore[arg-type]


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
    # A move of some milliseconds has taught it that a migration takes less than the first guess.
    assert world.executor.link().sync_s < first.sync_s
    assert world.executor.link().hop_s == first.hop_s
    world.instances[D0].call_s = 0.01
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
    await until(lambda: p1.is_draining)
    assert not world.executor.view().instances[P1].ready
    assert len(world.executor.view().under_way) == 1
    assert p1.role is Role.PREFILL
    p1.inflight_requests = 0
    assert (await switching).ending is Ending.DONE
    assert (p1.role, p1.is_draining, p1.num_changes) == (Role.DECODE, False, 1)
    (change,) = world.roles.recent()
    assert (change.state, change.old, change.role) == ("done", "prefill", "decode")


async def test_a_switch_that_takes_too_long_leaves_the_role(world):
    p1 = world.instances[P1]
    p1.inflight_requests = 3
    outcome = await world.executor.carry_out(
        step(SwitchRole(P1, Role.PREFILL, Role.DECODE), timeout_s=0.05)
    )
    assert outcome.ending is Ending.TIMED_OUT
    assert "3 requests are left" in outcome.reason
    assert (p1.role, p1.is_draining, p1.num_changes) == (Role.PREFILL, False, 0)


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
    assert (world.instances[P1].role, world.instances[P1].is_draining) == (Role.PREFILL, False)


async def test_switches_that_cannot_be(world):
    for name, role, error, said in [
        ("q0", "decode", UserError, "unknown instance: q0"),
        ("p1", "both", UserError, "unknown role: both"),
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
    with pytest.raises(MigrationError, match="does both"):
        world.roles.begin("p1", "decode", 1.0)
