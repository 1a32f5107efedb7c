"""One turn of the control loop: what may begin of what a policy wants."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from banaserve.base.errors import UserError
from banaserve.base.types import (
    Attempt,
    ClusterView,
    InstanceFacts,
    InstanceId,
    InstanceReport,
    InstanceView,
    Module,
    MoveModule,
    ReturnModule,
    Role,
    Step,
    SwitchRole,
)
from banaserve.orchestrator.control.move_policies import registry
from banaserve.orchestrator.control.move_policies.interface import MigrationPlan
from banaserve.orchestrator.control.turn import ControlLimits, Held, Mode, Remembered, turn, words

P0, P1, D0 = InstanceId("p0"), InstanceId("p1"), InstanceId("d0")
LAYERS = MoveModule(D0, P0, Module(10, 20), 1000)
SWITCH = SwitchRole(P1, Role.PREFILL, Role.DECODE)
BACK = ReturnModule(D0, P0, Module(3, 4, (1, 2)), 7)


def step(action: MoveModule | ReturnModule | SwitchRole) -> Step:
    return Step(action, (), 1.0, 2.0, 10.0)


@dataclass
class Wants:
    """A policy that wants these steps whatever it sees."""

    steps: tuple[Step, ...]

    def plan(self, cluster: ClusterView) -> MigrationPlan:
        assert cluster.now_s > 0
        return MigrationPlan(self.steps, is_balancing=True)


def seen(now_s: float = 100.0, under_way: tuple[Step, ...] = ()) -> ClusterView:
    return ClusterView(now_s, {}, under_way)


BOTH = Wants((step(LAYERS), step(SWITCH)))


@pytest.mark.parametrize(
    ("mode", "paused", "limits", "before", "under_way", "begins", "held"),
    [
        (Mode.ON, False, ControlLimits(), Remembered(), 0, 2, None),
        (Mode.DRY_RUN, False, ControlLimits(), Remembered(), 0, 0, Held.DRY_RUN),
        (Mode.ON, True, ControlLimits(), Remembered(), 0, 0, Held.PAUSED),
        (Mode.ON, False, ControlLimits(concurrent=1), Remembered(), 0, 1, Held.CONCURRENT),
        (Mode.ON, False, ControlLimits(concurrent=2), Remembered(), 2, 0, Held.CONCURRENT),
        (Mode.ON, False, ControlLimits(per_minute=1), Remembered(), 0, 1, Held.RATE),
        (Mode.ON, False, ControlLimits(per_minute=2), Remembered(begun_s=(50.0,)), 0, 1, Held.RATE),
        (Mode.ON, False, ControlLimits(per_minute=2), Remembered(begun_s=(39.0,)), 0, 2, None),
        (
            Mode.ON,
            False,
            ControlLimits(),
            Remembered().with_failed(LAYERS, 45.0),
            0,
            0,
            Held.FAILED,
        ),
        (Mode.ON, False, ControlLimits(), Remembered().with_failed(LAYERS, 30.0), 0, 2, None),
        (
            Mode.ON,
            False,
            ControlLimits(),
            Remembered().with_failed(SWITCH, 45.0),
            0,
            1,
            Held.FAILED,
        ),
    ],
)
def test_what_may_begin(mode, paused, limits, before, under_way, begins, held):
    found = turn(seen(under_way=(step(BACK),) * under_way), BOTH, mode, paused, limits, before)
    assert found.begin == BOTH.steps[:begins]
    # What counts on a step that is held is held with it.
    assert found.held == tuple((one, held) for one in BOTH.steps[begins:])
    assert len(found.after.begun_s) == begins + sum(at > 40 for at in before.begun_s)


def test_what_failed_is_known_again_with_other_bytes_and_forgotten_in_time():
    before = Remembered().with_failed(LAYERS, 90.0)
    again = Wants((step(replace(LAYERS, num_bytes=5)),))
    found = turn(seen(), again, Mode.ON, False, ControlLimits(), before)
    assert [reason for _, reason in found.held] == [Held.FAILED]
    later = turn(seen(200.0), again, Mode.ON, False, ControlLimits(), found.after)
    assert (later.begin, later.after.failed_s) == (again.steps, {})


def test_balancing_and_smoothed_reports_go_from_turn_to_turn():
    facts = InstanceFacts(30, 3, 1000, 1536, 16, 10**9)

    def cluster(now_s: float, busy: float) -> ClusterView:
        report = InstanceReport(1, 0, 0.5, busy, now_s)
        return ClusterView(
            now_s, {D0: InstanceView(D0, Role.DECODE, True, report, 1, 0, 1.0, facts)}
        )

    class Watching(Wants):
        def plan(self, cluster: ClusterView) -> MigrationPlan:
            self.seen = cluster
            return super().plan(cluster)

    policy = Watching(())
    first = turn(
        cluster(1.0, 1.0), policy, Mode.ON, False, ControlLimits(smoothing_s=4), Remembered()
    )
    assert not policy.seen.is_balancing
    turn(cluster(2.0, 0.0), policy, Mode.ON, False, ControlLimits(smoothing_s=4), first.after)
    report = policy.seen.instances[D0].report
    assert policy.seen.is_balancing
    assert report is not None
    assert report.busy_fraction == pytest.approx(0.75)


def test_a_step_that_always_fails_holds_no_other_up():
    facts = InstanceFacts(40, 40, 629_350_400, 20480, 16, 10**11, can_switch_role=False)

    def view(name: InstanceId, role: Role, used: float, now_s: float) -> InstanceView:
        report = InstanceReport(10, 0, used, 0.5, now_s, num_kv_blocks=4000, step_fill_fraction=1.0)
        return InstanceView(name, role, True, report, 10, 0, 1.0, facts)

    def cluster(now_s: float) -> ClusterView:
        roles = ((P0, Role.PREFILL, 0.1), (P1, Role.PREFILL, 0.2), (D0, Role.DECODE, 0.95))
        return ClusterView(now_s, {n: view(n, role, used, now_s) for n, role, used in roles})

    policy = registry.make("repaired")
    first = turn(cluster(100.0), policy, Mode.ON, False, ControlLimits(), Remembered())
    (failing,) = first.begin
    after = first.after.with_failed(failing.action, 101.0)
    again = turn(cluster(102.0), policy, Mode.ON, False, ControlLimits(), after)
    (other,) = again.begin
    assert Attempt.of(other.action) != Attempt.of(failing.action)
    assert again.held == ()
    # A minute later what failed is tried again.
    later = turn(cluster(170.0), policy, Mode.ON, False, ControlLimits(), again.after)
    assert [Attempt.of(one.action) for one in later.begin] == [Attempt.of(failing.action)]


def test_a_silent_instance_is_named_by_the_plan():
    facts = InstanceFacts(30, 3, 1000, 1536, 16, 10**9)
    views = {
        name: InstanceView(name, role, True, InstanceReport(1, 0, 0.5, 0.5, at_s), 1, 0, 1.0, facts)
        for name, role, at_s in ((P0, Role.PREFILL, 99.0), (D0, Role.DECODE, 90.0))
    }
    policy = registry.make("repaired")
    found = turn(ClusterView(100.0, views), policy, Mode.ON, False, ControlLimits(), Remembered())
    assert {str(n): str(r) for n, r in found.plan.left_out.items()} == {"d0": "its report is stale"}


@pytest.mark.parametrize(
    ("action", "kind", "said"),
    [
        (LAYERS, "layers", "move layers 10:20 from d0 to p0"),
        (BACK, "return", "return heads 1,2 of layers 3:4 from p0 to d0"),
        (SWITCH, "role", "switch p1 from prefill to decode"),
        (
            replace(SWITCH, step_tokens=512),
            "role",
            "switch p1 from prefill to decode with steps of",
        ),
        (replace(LAYERS, module=Module(0, 30, (2,))), "heads", "move heads 2 of layers 0:30"),
    ],
)
def test_actions_in_words(action, kind, said):
    assert Attempt.of(action).kind == kind
    assert words(action).startswith(said)
    assert Attempt.of(action).kind == kind
    same = replace(action, num_bytes=3) if not isinstance(action, SwitchRole) else action
    assert Attempt.of(same) == Attempt.of(action)


@pytest.mark.parametrize(
    "wrong", [{"concurrent": 0}, {"per_minute": 0}, {"retry_after_s": -1}, {"smoothing_s": 0}]
)
def test_limits_out_of_range(wrong):
    with pytest.raises(UserError):
        ControlLimits(**wrong)
