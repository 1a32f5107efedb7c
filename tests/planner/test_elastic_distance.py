"""Ways between machines in the elastic forecast: hand-over, modules and moves cost what they do."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from banaserve.base.types import (
    Distance,
    InstanceId,
    InstanceReport,
    InstanceView,
    Module,
    ModulePlacement,
    MoveModule,
    ObservedRequest,
    Role,
)
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.model.moving import migration_s
from banaserve.orchestrator.control.move_policies.interface import RejectReason
from banaserve.orchestrator.planner.candidates.planning import steps_of
from banaserve.orchestrator.planner.decision import Decision, PlannedMove, Situation
from banaserve.orchestrator.planner.forecasting.forecast import (
    Forecast,
    FutureRequest,
    ServiceLimits,
    forecast,
)
from banaserve.orchestrator.planner.options import ElasticOptions
from banaserve.orchestrator.planner.policy import decide
from banaserve.sim.cluster.cell import Far
from banaserve.sim.system import System
from depth import chosen_seed

OPT = profiles.load("opt-13b-a100")
P, D = InstanceId("p0"), InstanceId("d0")
SLOW = Distance(round_trip_s=0.02, bytes_per_s=1.25e9)
QUICK = Distance(round_trip_s=1e-9, bytes_per_s=1e15)
"""Way that takes no time beside the profile's own link."""


def apart(way: Distance | None) -> Far:
    return {P: {D: way}, D: {P: way}}


def told(far: Far | None, placements: tuple[ModulePlacement, ...] = ()) -> Forecast:
    """Returns what becomes of a few prompts that are handed over one at a time."""
    system = System(
        kind="banaserve", prefill=1, decode=1, overlap_fraction=None, attention_fraction=None
    )
    roles = [(P, Role.PREFILL, 2048), (D, Role.DECODE, 2048)]
    future = [FutureRequest(3.0 * n, 600, 0, 50) for n in range(5)]
    return forecast(OPT, system, roles, future, ServiceLimits(), 30.0, (), placements, far=far)


def test_a_hand_over_to_another_machine_takes_what_the_way_takes() -> None:
    near, far = told(None), told(apart(SLOW))
    longer_s = 600 * OPT.model.token_bytes / SLOW.bytes_per_s + SLOW.round_trip_s
    for one, other in zip(near.ends_s, far.ends_s, strict=True):
        assert other - one == pytest.approx(longer_s, abs=1e-6)
    assert far.mean < near.mean


@pytest.mark.parametrize("far", [{}, apart(None), apart(QUICK)], ids=["none", "unknown", "quick"])
def test_one_machine_an_unknown_way_and_one_that_takes_no_time_are_what_they_were(far) -> None:
    assert told(far).ends_s == pytest.approx(told(None).ends_s, abs=1e-6)


def test_messages_of_a_module_on_another_machine_lengthen_each_step_of_its_host() -> None:
    gone = (ModulePlacement(Module(30, 40), D, P, 1, 0.0, 10**9),)
    near, far = told(None, gone), told({D: {P: SLOW}}, gone)
    # Only the host's way to its guest is given: the hand-over is as quick as before.
    for one, other in zip(near.ends_s, far.ends_s, strict=True):
        assert other - one > 40 * SLOW.round_trip_s


def view(name: InstanceId, role: Role, way: Distance | None = None) -> InstanceView:
    other = D if name == P else P
    return InstanceView(
        name,
        role,
        True,
        InstanceReport(0, 0, 0.2, 0.5, 0.0),
        0,
        0,
        1000.0,
        OPT.facts,
        step_tokens=2048,
        far={} if way is None else {other: way},
    )


@pytest.mark.parametrize("dilation", [1.0, 4.0])
@pytest.mark.parametrize("way", [None, SLOW, QUICK])
def test_a_move_takes_as_long_as_its_bytes_do_on_the_way(way: Distance | None, dilation) -> None:
    views = {P: view(P, Role.PREFILL, way), D: view(D, Role.DECODE, way)}
    move = PlannedMove(D, P, Module(30, 40))
    planned = Decision((), (), 0.1, None, "", (), (move,))
    [step] = steps_of(planned, views, OPT, dilation, 60.0)
    assert isinstance(step.action, MoveModule)
    own = migration_s(step.action.num_bytes, OPT.link) * dilation
    if way is SLOW:
        # The way is measured in seconds of the clock, the profile's are longer.
        expected = step.action.num_bytes / SLOW.bytes_per_s + OPT.link.sync_s * dilation
        assert step.cost_s == pytest.approx(max(own, expected))
        assert dilation > 1 or step.cost_s > 2 * own
    else:
        assert step.cost_s == own


def decided(way: Distance | None, dilation: float = 1.0) -> dict[str, float]:
    """Returns the worth of each arrangement of two instances that do both."""
    draws, at_s, requests = random.Random(chosen_seed(4)), 0.0, []
    while (at_s := at_s + dilation * draws.expovariate(1.5)) < 60.0 * dilation:
        requests.append(ObservedRequest(at_s, 900, 0, 60, None, at_s + 0.5, at_s + 1))
    views = [view(P, Role.COLOCATED, way), view(D, Role.COLOCATED, way)]
    options = ElasticOptions(profile=OPT.name, dilation=dilation, window_s=60.0 * dilation)
    options = replace(options, horizon_s=60.0 * dilation)
    found = decide(Situation(60.0 * dilation, views, requests, None, False, 2), options)
    return {
        one.candidate: one.value for one in found.candidates if one.reason is RejectReason.WORSE
    }


def test_what_hands_over_between_machines_is_worth_less_and_what_does_not_is_not() -> None:
    near, far = decided(None), decided(SLOW)
    assert near.keys() == far.keys()
    together = [words for words in near if "2 both" in words]
    split = [words for words in near if words.startswith("1 prefill")]
    assert together
    assert split
    assert all(near[words] == far[words] for words in together)
    assert all(near[words] - far[words] > 0.3 for words in split)
