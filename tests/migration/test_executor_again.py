"""An orchestrator that begins again finds out from the instances what is where."""

from __future__ import annotations

import gc
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

pytest.importorskip("vllm")

import executor_doubles as doubles
from banaserve.base.clock import WallClock
from banaserve.base.types import (
    InstanceFacts,
    InstanceId,
    Module,
    MoveModule,
    ReturnModule,
    Step,
)
from banaserve.contracts.instances import Ending
from banaserve.serving.operations.executor import MoveExecutor
from waiting import until

D0, P0 = InstanceId("d0"), InstanceId("p0")
LAYERS = Module(10, 20)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[doubles.World]:
    made = doubles.World(tmp_path)
    made.overseer.start()
    await made.executor.discover()
    yield made
    await made.roles.stop()
    await made.overseer.stop()
    await made.cluster.close()


async def test_a_new_executor_finds_what_is_away_and_can_take_it_home(world):
    move = MoveModule(D0, P0, LAYERS, 1000)
    assert (await world.executor.carry_out(Step(move, (), 1.0, 2.0, 20.0))).ending is Ending.DONE
    await until(lambda: world.instances[D0].placements)
    coordinator = world.cluster.coordinator
    for host_state in coordinator.hosts.values():
        host_state.status = None
    world.instances[D0].placements = ()

    again = MoveExecutor(world.served, coordinator, world.roles, WallClock(), 2.0)
    await again.discover()
    await until(lambda: world.instances[D0].placements)
    seen = again.view()
    (placement,) = seen.instances[D0].placements
    assert (placement.module, placement.guest) == (LAYERS, P0)
    assert seen.instances[D0].facts.can_move_layers
    assert seen.under_way == ()
    home = Step(ReturnModule(D0, P0, LAYERS, 0), (), 1.0, 2.0, 20.0)
    assert (await again.carry_out(home)).ending is Ending.DONE
    await until(lambda: not world.instances[D0].placements)


async def test_an_engine_that_is_replaced_is_asked_anew_whether_it_can_migrate(world):
    name = InstanceId("x0")
    assert not world.executor.view().instances[name].facts.can_move_layers
    world.instances[name].restart()
    world.instances[name].engine.vllm_config = doubles.CONFIG
    await until(lambda: world.executor.view().instances[name].facts.can_move_layers)


async def test_facts_of_engines_that_have_ended_are_not_kept(world):
    def num_kept() -> int:
        world.executor.view()
        gc.collect()
        return sum(type(one) is InstanceFacts for one in gc.get_objects())

    first = num_kept()
    for _ in range(5):
        world.instances[D0].restart()
        world.instances[D0].engine.vllm_config = doubles.CONFIG
        await until(lambda: world.executor.view().instances[D0].facts.can_move_layers)
    assert num_kept() == first
