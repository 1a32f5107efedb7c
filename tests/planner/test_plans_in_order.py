"""Steps of an ordered plan on real executors: each begins when the one before it is done."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

import executor_doubles as doubles
from banaserve.base.clock import WallClock
from banaserve.base.types import (
    ClusterView,
    InstanceId,
    Module,
    MoveModule,
    ReturnModule,
    Role,
    Step,
    SwitchRole,
)
from banaserve.contracts.instances import Ending, StepOutcome
from banaserve.orchestrator.control.move_policies.interface import MigrationPlan
from banaserve.orchestrator.control.turn import ControlLimits, Held, Mode
from banaserve.orchestrator.planner.loop import loop
from banaserve.orchestrator.planner.loop.decision_log import DecisionLog
from banaserve.orchestrator.planner.loop.loop import Controller, ControllerOptions
from waiting import until

D0, P0, P1 = InstanceId("d0"), InstanceId("p0"), InstanceId("p1")
LAYERS = Module(10, 20)


def step(action: object) -> Step:
    return Step(action, (), 0.0, 0.1, 20.0)  # type: ignore[arg-type]


PLAN = (
    step(ReturnModule(D0, P0, LAYERS, 1000)),
    step(SwitchRole(D0, Role.DECODE, Role.COLOCATED)),
    step(MoveModule(D0, P1, Module(0, 5), 1000)),
)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[doubles.World]:
    made = doubles.World(tmp_path)
    made.overseer.start()
    await made.executor.discover()
    assert (await made.executor.carry_out(step(MoveModule(D0, P0, LAYERS, 1000)))).ending is (
        Ending.DONE
    )
    yield made
    await made.roles.stop()
    await made.overseer.stop()
    await made.cluster.close()


class Once:
    """A policy that plans once, and notes what it was told is under way."""

    def __init__(self) -> None:
        self.plans = [MigrationPlan(PLAN, is_ordered=True)]
        self.seen: list[ClusterView] = []
        self.policy = self

    def plan(self, view: ClusterView) -> MigrationPlan:
        self.seen.append(view)
        return self.plans.pop() if self.plans else MigrationPlan()


@pytest.fixture
async def made(world, monkeypatch) -> AsyncIterator[SimpleNamespace]:
    policy, log = Once(), DecisionLog(None)
    monkeypatch.setattr(loop.registry, "make_named", lambda name, **section: policy)
    limits = ControlLimits(concurrent=1)
    options = ControllerOptions(mode=Mode.ON, policy="still", interval_s=0.01, limits=limits)
    controller = Controller(world.executor, options, log, WallClock(), lambda: 1.7e9)
    yield SimpleNamespace(policy=policy, log=log, controller=controller)
    await controller.stop()


async def test_a_module_is_home_before_the_role_changes_and_leaves_after(world, made, monkeypatch):
    events = []
    carried = world.executor.carry_out

    async def carry_out(one: Step) -> StepOutcome:
        events.append(("begins", one.action))
        outcome = await carried(one)
        events.append((str(outcome.ending), one.action))
        return outcome

    monkeypatch.setattr(world.executor, "carry_out", carry_out)
    made.controller.start()
    await until(lambda: len(events) == 6)
    assert events == [
        pair for one in PLAN for pair in (("begins", one.action), ("done", one.action))
    ]
    assert world.instances[D0].role is Role.COLOCATED
    await until(lambda: [p.module for p in world.instances[D0].placements] == [Module(0, 5)])
    # What waits is under way to the policy, which plans nothing over it.
    assert any(PLAN[2] in view.under_way for view in made.policy.seen)


async def test_in_a_pause_no_further_step_begins(world, made, monkeypatch):
    begun = []

    async def carry_out(one: Step) -> StepOutcome:
        begun.append(one)
        made.controller.set_paused(True)
        return StepOutcome(Ending.DONE, "")

    monkeypatch.setattr(world.executor, "carry_out", carry_out)
    made.controller.start()
    await until(lambda: len(made.policy.seen) > 3)
    assert begun == [PLAN[0]]
    steps = next(one.steps for one in made.log.last(100) if one.steps)
    assert [one.held for one in steps] == ["", str(Held.PAUSED), str(Held.PAUSED)]
    assert made.policy.seen[-1].under_way == ()


async def test_after_a_step_that_fails_none_begins(world, made, monkeypatch):
    begun = []

    async def carry_out(one: Step) -> StepOutcome:
        begun.append(one)
        return StepOutcome(Ending.REFUSED, "the guest is gone")

    monkeypatch.setattr(world.executor, "carry_out", carry_out)
    made.controller.start()
    await until(lambda: len(made.policy.seen) > 3)
    assert begun == [PLAN[0]]
    assert world.instances[D0].role is Role.DECODE
    steps = next(one.steps for one in made.log.last(100) if one.steps)
    assert [one.held for one in steps] == ["", str(Held.EARLIER), str(Held.EARLIER)]
    assert made.policy.seen[-1].under_way == ()
