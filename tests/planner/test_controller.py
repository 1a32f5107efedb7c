"""The control loop around its decisions: effects, failures, pause, and the decision log."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve.base.types import (
    Attempt,
    BackPressure,
    ClusterView,
    InstanceFacts,
    InstanceId,
    InstanceReport,
    InstanceView,
    ModulePlacement,
    MoveModule,
    Role,
    Step,
)
from banaserve.contracts.control_api import ControllerState, DecisionRecord
from banaserve.contracts.instances import Ending, StepOutcome
from banaserve.orchestrator.control.model.moving import Link
from banaserve.orchestrator.control.turn import ControlLimits, Mode
from banaserve.orchestrator.planner.loop.decision_log import DecisionLog
from banaserve.orchestrator.planner.loop.loop import Controller, ControllerOptions

P0, D0 = InstanceId("p0"), InstanceId("d0")
KV_BYTES = 300 * 16 * 1536 * 30
FACTS = InstanceFacts(
    30, 3, 1000, 1536, 16, KV_BYTES, hidden_bytes=2304, kv_bytes=KV_BYTES, max_kv_blocks=600
)
SECTION = {"rho": 0.0}
MIB = 2**20


class Turns:
    """A clock that stands still until a test lets the loop go on."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self._gate = asyncio.Event()
        self.is_waiting = asyncio.Event()

    def now(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.is_waiting.set()
        await self._gate.wait()
        self._gate.clear()
        self.now_s += seconds

    async def next(self) -> None:
        """Let one turn happen."""
        await self.is_waiting.wait()
        self.is_waiting.clear()
        self._gate.set()
        await self.is_waiting.wait()


class Cluster:
    """d0 is full and p0 empty until a module has moved; an executor of it."""

    def __init__(self, clock: Turns) -> None:
        self.clock = clock
        self.placements: tuple[ModulePlacement, ...] = ()
        self.under_way: list[Step] = []
        self.may_end = asyncio.Event()
        self.outcome = StepOutcome(Ending.DONE, num_bytes=5, stall_s=0.01, blocks_gained=20)
        self.failure: Exception | None = None
        self.is_silent = False
        self.back_pressure: BackPressure | None = None
        self.num_discovered = 0
        self.learnt = Link(1e9, 0.01)
        self.started: list[Step] = []

    async def discover(self) -> None:
        self.num_discovered += 1

    def view(self) -> ClusterView:
        if self.failure is not None:
            raise self.failure
        now_s = self.clock.now_s
        away = bool(self.placements)
        views = {}
        for name, role, used in ((P0, Role.PREFILL, 0.1), (D0, Role.DECODE, 0.5 if away else 0.9)):
            at_s = now_s - 60 if self.is_silent and name == D0 else now_s
            report = InstanceReport(4, 2, used, 0.2, at_s, step_s=0.05, num_kv_blocks=300)
            if name == P0:
                report = replace(report, back_pressure=self.back_pressure)
            views[name] = InstanceView(
                name,
                role,
                True,
                report,
                4,
                0,
                1000.0,
                FACTS,
                self.placements if name == D0 else (),
                changed_s=now_s if away else None,
            )
        return ClusterView(now_s, views, tuple(self.under_way))

    async def carry_out(self, step: Step) -> StepOutcome:
        assert isinstance(step.action, MoveModule)
        self.started.append(step)
        self.under_way.append(step)
        try:
            await self.may_end.wait()
        finally:
            self.under_way.remove(step)
        if self.outcome.ending is Ending.DONE:
            action = step.action
            self.placements = (ModulePlacement(action.module, D0, P0, 2, self.clock.now_s),)
        return self.outcome

    def link(self) -> Link:
        return self.learnt


@pytest.fixture
def clock() -> Turns:
    return Turns()


@pytest.fixture
def cluster(clock: Turns) -> Cluster:
    return Cluster(clock)


@pytest.fixture
async def make(cluster: Cluster, clock: Turns, tmp_path: Path) -> AsyncIterator[object]:
    made = []

    def controller(mode: Mode = Mode.ON, **options: object) -> Controller:
        log = DecisionLog(tmp_path / "decisions.jsonl")
        chosen = {"section": SECTION, "limits": ControlLimits(retry_after_s=20), **options}
        one = Controller(cluster, ControllerOptions(mode=mode, **chosen), log, clock, lambda: 1.7e9)
        one.start()
        made.append(one)
        return one

    yield controller
    for one in made:
        await one.stop()


async def test_a_hot_instance_a_step_its_result_and_what_it_changed(make, cluster, clock, tmp_path):
    controller = make()
    await clock.next()
    (decision,) = controller.log.last()
    (wanted,) = decision.steps
    assert wanted.what.startswith("move ")
    assert (decision.instances["d0"].memory, decision.gap) == (0.9, pytest.approx(0.9))
    assert wanted.predicted["d0"].kv_blocks > 0
    assert (wanted.held, wanted.result) == ("", None)
    assert decision.rejected
    assert all(one.reason for one in decision.rejected)
    cluster.may_end.set()
    for _ in range(5):
        await clock.next()
    assert wanted.result is not None
    assert (wanted.result.ending, wanted.result.blocks_gained) == ("done", 20)
    assert wanted.result.changed["d0"].memory == pytest.approx(-0.4)
    assert len(cluster.started) == 1
    lines = [json.loads(line) for line in (tmp_path / "decisions.jsonl").read_text().splitlines()]
    told = [line for line in lines if line["number"] == decision.number]
    assert (told[0]["steps"][0]["result"], told[-1]["steps"][0]["result"]["ending"]) == (
        None,
        "done",
    )


async def test_nothing_more_of_an_instance_that_takes_part_in_a_step(make, cluster, clock):
    controller = make()
    for _ in range(4):
        await clock.next()
    assert len(cluster.started) == 1
    assert any("as many moves as it may" in r.reason for r in controller.log.last()[-1].rejected)


async def test_a_dry_run_decides_and_moves_nothing(make, cluster, clock):
    controller = make(Mode.DRY_RUN)
    for _ in range(3):
        await clock.next()
    (decision,) = controller.log.last()
    assert (decision.turns, decision.mode) == (3, "dry-run")
    assert decision.steps[0].held == "dry run: nothing is moved"
    assert cluster.started == []


async def test_off_never_begins(make, cluster):
    controller = make(Mode.OFF)
    await asyncio.sleep(0)
    assert (controller.status().state, cluster.num_discovered) == (ControllerState.OFF, 0)


async def test_paused_by_hand_and_let_go_on(make, cluster, clock):
    controller = make()
    controller.set_paused(True)
    await clock.next()
    assert controller.status().state is ControllerState.PAUSED
    assert controller.log.last()[0].steps[0].held == "the orchestrator is paused"
    assert cluster.started == []
    controller.set_paused(False)
    await clock.next()
    assert controller.status().state is ControllerState.RUNNING
    assert len(cluster.started) == 1


async def test_a_failure_is_one_line_and_the_loop_begins_again(make, cluster, clock, caplog):
    controller = make()
    await clock.next()
    cluster.failure = RuntimeError("two\nlines")
    with caplog.at_level(logging.ERROR):
        await clock.next()
    (line,) = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert "RuntimeError: two lines" in line
    assert "\n" not in line
    status = controller.status()
    assert (status.state, status.num_restarts) == (ControllerState.RESTARTING, 1)
    cluster.failure = None
    await clock.next()  # the pause
    await clock.next()
    assert controller.status().state is ControllerState.RUNNING
    assert cluster.num_discovered == 2  # it asks the instances again what is where
    assert len(cluster.under_way) == 1  # what was under way is still


async def test_a_decision_like_the_one_before_ends_a_row_of_failures(make, cluster, clock, caplog):
    make(Mode.DRY_RUN)
    for _ in range(3):
        cluster.failure = None
        await clock.next()  # what is left of a pause
        await clock.next()
        cluster.failure = RuntimeError("now and then")
        await clock.next()
    said = [r.getMessage() for r in caplog.records if r.levelno == logging.ERROR]
    assert ["begins again in 1 s" in line for line in said] == [True] * 3


async def test_what_failed_is_not_tried_again_at_once(make, cluster, clock):
    cluster.outcome = StepOutcome(Ending.REFUSED, "no room")
    cluster.may_end.set()
    controller = make()
    await clock.next()
    first = controller.log.last()[0].steps[0]
    await clock.next()
    assert first.result is not None
    assert (first.result.ending, first.result.reason) == ("refused", "no room")
    rejected = {one.reason for one in controller.log.last()[-1].rejected}
    assert "it failed a moment ago" in rejected
    for _ in range(10):
        await clock.next()
    # Heads, layers in their place, and once again when some time has passed.
    assert [Attempt.of(step.action).kind for step in cluster.started] == ["heads", "layers"] * 2


async def test_an_executor_that_breaks_is_a_failed_step(make, cluster, clock, monkeypatch):
    async def broken(step: Step) -> StepOutcome:
        raise RuntimeError("unforeseen")

    monkeypatch.setattr(cluster, "carry_out", broken)
    controller = make()
    await clock.next()
    await clock.next()
    result = controller.log.last()[0].steps[0].result
    assert (result.ending, result.reason) == ("failed", "RuntimeError: unforeseen")
    assert controller.status().num_restarts == 0


async def test_a_silent_instance_is_left_out_visibly(make, cluster, clock):
    cluster.is_silent = True
    controller = make()
    await clock.next()
    assert controller.status().left_out == {"d0": "its report is stale"}
    assert cluster.started == []


async def test_the_log_says_that_prefill_waits_for_decode(make, cluster, clock):
    """Once for as long as it does, whatever the numbers: those are of the last turn."""
    controller = make(Mode.DRY_RUN)
    for pressure in (
        None,
        BackPressure(1, 300, 0.2, 11, 12, MIB),
        BackPressure(3, 900, 1.5, 12, 12, MIB),
    ):
        cluster.back_pressure = pressure
        await clock.next()
    before, under = controller.log.last()
    assert (before.back_pressure, under.turns) == ("", 2)
    assert under.back_pressure == (
        "prefill waits: the store holds 12 of 12 blocks (12 MiB) for hand-overs; "
        "3 prompts wait, the longest for 1.5 s"
    )


async def test_measured_links_reach_the_policy(make, cluster, clock):
    cluster.learnt = Link(1e8, 0.5)
    controller = make(section={"rho": 0.0, "min_timeout_s": 1.0})
    await clock.next()
    (wanted,) = controller.log.last()[0].steps
    assert isinstance(cluster.started[0].action, MoveModule)
    assert wanted.cost_s == pytest.approx(0.5 + cluster.started[0].action.num_bytes / 1e8)
    assert controller.status().link_bytes_per_s == 1e8


async def test_a_policy_without_options_for_the_link_gets_none(make, cluster, clock):
    cluster.learnt = Link(1e8, 0.5)
    controller = make(policy="still", section={})
    await clock.next()
    assert controller.log.last()[0].reason == "the policy moves nothing"
    assert controller.status().num_restarts == 0


async def test_what_a_person_has_given_is_not_learnt(make, cluster, clock):
    cluster.learnt = Link(1e8, 0.5)
    controller = make(section={"rho": 0.0, "link_sync_s": 3.0})
    await clock.next()
    assert controller.log.last()[0].steps[0].cost_s > 3.0


async def test_stopping_aborts_what_is_under_way(make, cluster, clock):
    controller = make()
    await clock.next()
    assert len(cluster.under_way) == 1
    await controller.stop()
    assert cluster.under_way == []
    assert controller.status().state is ControllerState.OFF


def test_wrong_options_stop_before_anything_runs(cluster, clock, tmp_path):
    log = DecisionLog()
    with pytest.raises(UserError, match="unknown migration policy: clever"):
        Controller(cluster, ControllerOptions(policy="clever"), log, clock, lambda: 0.0)
    with pytest.raises(UserError, match="delta_upp"):
        Controller(cluster, ControllerOptions(section={"delta_upp": 1}), log, clock, lambda: 0.0)
    with pytest.raises(UserError, match="--decision-log"):
        DecisionLog(tmp_path / "no" / "folder.jsonl")
    with pytest.raises(UserError, match="--decision-log"):
        DecisionLog(tmp_path)


def test_the_log_is_for_its_user_and_appended_to(tmp_path):
    path = tmp_path / "decisions.jsonl"
    decision = DecisionRecord(0, 1.7e9, "on", "repaired", 0.1, False, "none", {}, {}, [], [])
    DecisionLog(path).add(decision)
    assert path.stat().st_mode & 0o777 == 0o600
    DecisionLog(path).add(decision)
    assert len(path.read_text().splitlines()) == 2


async def test_the_log_is_bounded(make, cluster, clock):
    log = DecisionLog(kept=3)
    controller = make(Mode.DRY_RUN)
    await clock.next()
    (decision,) = controller.log.last()
    import msgspec

    for number in range(6):
        log.add(msgspec.structs.replace(decision, reason=f"reason {number}"))
    assert [one.number for one in log.last()] == [4, 5, 6]
    assert [one.number for one in log.last(1)] == [6]
    assert log.last(0) == []
