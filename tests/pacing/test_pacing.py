"""Modelled time: the timeline of a device, what a step takes, and what is recorded of it."""

from __future__ import annotations

from pathlib import Path

import pytest

from banaserve.base.types import Module
from banaserve.contracts.move_phase import ModelGeometry
from banaserve.migration.units.heads import HeadSet
from banaserve.migration.units.layers import LayerRange
from banaserve.orchestrator.control.costs import modules as module_costs
from banaserve.orchestrator.control.costs.profile import Profile, load
from banaserve.orchestrator.control.costs.steps import StepCosts
from banaserve.orchestrator.control.costs.transfers import Copied, overlapped_s, step_times
from banaserve.orchestrator.control.model.learnt_time import StepWork
from banaserve.pacing import step_log
from banaserve.pacing.pacer import DeviceClock, Pacer, in_parts
from banaserve.pacing.placement_cost import ATTENTION_FRACTION, RemoteShare, modelled
from banaserve.pacing.step_log import PacedStep, StepLog, StepReader
from banaserve.sim.system import System
from benchmarks.drivers.layer_pipeline import pipeline

PREFILL = StepWork(prefill_tokens=512, prefill_pairs=512 * 512)
PREFILL_S = 18.10e-3 + 512 * 0.10191e-3 + 512 * 512 * 7.122e-9
DECODE = StepWork(decode_requests=10, context_tokens=5000)
DECODE_S = 19.93e-3 + 5000 * 6.269e-7 + 10 * 0.03851e-3


@pytest.fixture(scope="module")
def profile() -> Profile:
    return load("opt-13b-a100")


class VirtualTime:
    """A clock that sleeps in no time."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def now(self) -> float:
        return self.now_s

    def sleep(self, seconds: float) -> None:
        assert seconds > 0
        self.now_s += seconds


@pytest.fixture
def time() -> VirtualTime:
    return VirtualTime()


def pacer(profile: Profile, folder: Path, time: VirtualTime, name: str = "d0", dilation=1.0):
    return Pacer(profile, name, folder, dilation, time.now, time.sleep)


def last_step(folder: Path, name: str = "d0") -> PacedStep:
    return StepReader(folder / f"{name}.steps").steps()[-1]


# ---- the device


def test_steps_follow_each_other_whatever_the_engine_takes_between_them():
    device = DeviceClock(10.0)
    device.begin(1.0)
    assert device.deadline_s == 11.0
    assert device.end(10.4) is False
    device.begin(2.0)
    assert device.deadline_s == 13.0


def test_an_engine_without_work_gives_its_device_time_away():
    device = DeviceClock(10.0)
    device.woke(15.0)
    device.begin(1.0)
    assert device.deadline_s == 16.0
    device.woke(12.0)
    assert device.free_s == 15.0


def test_a_step_that_overruns_delays_the_next_one():
    device = DeviceClock(10.0)
    device.begin(1.0)
    assert device.end(11.5) is True
    device.begin(1.0)
    assert device.deadline_s == 12.5


# ---- what a step takes


@pytest.mark.parametrize(("work", "expected_s"), [(PREFILL, PREFILL_S), (DECODE, DECODE_S)])
def test_a_step_without_copies_takes_what_the_profile_says(profile, work, expected_s):
    times = step_times(StepCosts(profile), work, Copied())
    assert times.step_s == pytest.approx(expected_s)
    assert times.compute_s == pytest.approx(expected_s)
    assert times.fetch_s == 0


def test_a_step_of_both_kinds_has_the_larger_fixed_part_once(profile):
    both = StepWork(512, 512 * 512, 10, 5000)
    times = step_times(StepCosts(profile), both, Copied())
    assert times.step_s == pytest.approx(PREFILL_S - 18.10e-3 + DECODE_S)


def test_copies_hide_behind_computing_but_for_one_layer_each(profile):
    token_s = profile.model.token_bytes / 25e9
    times = step_times(StepCosts(profile), PREFILL, Copied(fetched=512, saved=512))
    assert times.fetch_s == pytest.approx(512 * token_s)
    assert times.fetch_s < times.compute_s
    assert times.step_s == pytest.approx(times.compute_s + 2 * times.fetch_s / 40)


def test_a_fetch_longer_than_computing_is_what_the_step_takes(profile):
    token_s = profile.model.token_bytes / 25e9
    times = step_times(StepCosts(profile), DECODE, Copied(fetched=2000))
    assert times.step_s == pytest.approx(2000 * token_s + times.compute_s / 40)


@pytest.mark.parametrize(
    "times_s", [(0.0, 2.0, 0.0), (1.0, 2.0, 3.0), (3.0, 2.0, 1.0), (0.5, 2.0, 0.5), (2.0, 2.0, 0.0)]
)
def test_layers_overlap_as_in_the_three_stage_pipeline(times_s):
    stages = [[seconds / 40] * 40 for seconds in times_s]
    assert overlapped_s(*times_s, num_layers=40) == pytest.approx(pipeline(*stages).end_s)


def test_what_is_fetched_before_the_step_hides_behind_nothing(profile):
    costs = StepCosts(profile)
    times = step_times(costs, DECODE, Copied(fetched_before=32))
    assert times.step_s == pytest.approx(DECODE_S + 32 * costs.fetch_token_s)


# ---- what is away


def test_layers_and_heads_stand_for_the_same_share_of_the_modelled_model(profile):
    own = ModelGeometry(10, 4)
    assert modelled(profile, own, LayerRange(2, 5)) == [Module(8, 20)]
    found = modelled(profile, own, HeadSet({0: (1,), 9: (3, 0)}))
    assert found == [
        Module(0, 4, tuple(range(10, 20))),
        Module(36, 40, (*range(10), *range(30, 40))),
    ]


def test_what_is_away_adds_messages_and_takes_its_share_elsewhere(profile):
    own = ModelGeometry(10, 4)
    away = RemoteShare.of(profile, own, [(LayerRange(0, 5), "p0"), (HeadSet({9: (0, 1)}), "p1")])
    heads = Module(36, 40, tuple(range(20)))
    hop_s = sum(module_costs.hop_s(profile, m, 7) for m in (Module(0, 20), heads))
    assert away.hop_s + 7 * away.hop_token_s == pytest.approx(hop_s)
    assert dict(away.shares) == {
        "p0": pytest.approx(0.5),
        "p1": pytest.approx(0.05 * ATTENTION_FRACTION),
    }


def test_heads_take_along_what_the_simulator_says():
    assert System(kind="static", prefill=1, decode=1).attention_fraction == ATTENTION_FRACTION


# ---- the pacer


def test_a_step_ends_when_its_dilated_time_is_up(profile, tmp_path, time):
    paced = pacer(profile, tmp_path, time, dilation=4.0)
    times = paced.begin(DECODE, Copied())
    assert times.compute_s == pytest.approx(4 * DECODE_S)
    time.now_s += 0.01
    paced.end()
    assert time.now_s == pytest.approx(100 + 4 * DECODE_S)
    step = last_step(tmp_path)
    assert step.modelled_s == pytest.approx(4 * DECODE_S)
    assert step.took_s == pytest.approx(4 * DECODE_S)
    assert step.worked_s == pytest.approx(0.01)
    assert (step.prefill_tokens, step.decode_requests) == (0, 10)


def test_steps_that_overrun_are_counted(profile, tmp_path, time):
    paced = pacer(profile, tmp_path, time)
    for worked_s in (0.001, 0.5, 0.001):
        paced.begin(DECODE, Copied())
        time.now_s += worked_s
        paced.end()
    sums = StepReader(tmp_path / "d0.steps").sums()
    assert (sums.num_steps, sums.num_overrun) == (3, 1)
    assert sums.modelled_s == pytest.approx(3 * DECODE_S)
    assert sums.late_s == pytest.approx(0.5 - DECODE_S)


def test_remote_layers_slow_the_device_that_they_run_on(profile, tmp_path, time):
    host, target = (pacer(profile, tmp_path, time, name) for name in ("d0", "p0"))
    host.away = RemoteShare(hop_s=0.001, shares=(("p0", 0.25),))
    time.now_s += 2.0  # each has seen the other's record
    for one in (target, host):
        one.begin(DECODE, Copied())
        one.end()
    assert last_step(tmp_path, "p0").modelled_s == pytest.approx(DECODE_S)
    assert last_step(tmp_path).modelled_s == pytest.approx(DECODE_S + 0.001)
    target.begin(DECODE, Copied())
    target.end()
    assert last_step(tmp_path, "p0").modelled_s == pytest.approx(1.25 * DECODE_S)
    host.begin(DECODE, Copied())
    host.end()
    target.woke()
    target.begin(DECODE, Copied())
    target.end()
    assert last_step(tmp_path, "p0").modelled_s == pytest.approx(DECODE_S), "it was idle then"


LONG = StepWork(prefill_tokens=2048, prefill_pairs=2048 * 2048)


def long_part_s(num_parts: int) -> float:
    return 18.10e-3 + (2048 * 0.10191e-3 + 2048 * 2048 * 7.122e-9) / num_parts


def test_half_the_layers_at_once_by_hand(profile):
    """m parts of two equal stages: (m + 1) / 2 of a part, each with the fixed part once more."""
    costs = StepCosts(profile)
    assert in_parts(costs, LONG, (0.5,), 1) == pytest.approx((0.0, long_part_s(1)))
    for most in (2, 4):
        expected_s = (most + 1) / 2 * long_part_s(most)
        found = in_parts(costs, LONG, (0.5,), most)
        assert found.relief == pytest.approx(1 - expected_s / long_part_s(1))
        assert found.busy_s == pytest.approx(most * long_part_s(most))
    best = in_parts(costs, LONG, (0.5,), 64)
    assert best.relief == pytest.approx(
        1 - min((m + 1) / 2 * long_part_s(m) for m in range(1, 65)) / long_part_s(1), abs=1e-3
    )
    assert 1.2 < 1 / (1 - best.relief) < 1.5, "the fixed part keeps it from 2"
    assert in_parts(costs, LONG, (), 64).relief == 0.0, "nothing is away"
    assert in_parts(costs, DECODE, (0.5,), 64).relief == 0.0, "ten requests are one part"


def test_a_step_in_parts_takes_less_and_its_guest_more(profile, tmp_path, time):
    host, guest = pacer(profile, tmp_path, time), pacer(profile, tmp_path, time, "p0")
    guest.begin(PREFILL, Copied())
    guest.end()
    layers = [(LayerRange(6, 12), "p0")]
    host.away = RemoteShare.of(profile, ModelGeometry(12, 3), layers, max_microbatches=4)
    host.begin(LONG, Copied())
    host.end()
    hop_s = host.away.hop_s + 2048 * host.away.hop_token_s
    assert last_step(tmp_path).modelled_s == pytest.approx(2.5 * long_part_s(4) + hop_s)
    busy_s = StepReader(tmp_path / "d0.steps").taken("p0")
    assert busy_s == pytest.approx(0.5 * 4 * long_part_s(4))


def test_nothing_ends_that_has_not_begun(profile, tmp_path, time):
    pacer(profile, tmp_path, time).end()
    assert time.now_s == 100.0


# ---- the record


def test_an_instance_that_starts_again_goes_on_counting(tmp_path):
    path = tmp_path / "p0.steps"
    StepLog(path, 2.0).add(PacedStep(1, 2, 1, 2, 3, 4), overran=True)
    StepLog(path, 2.0).add(PacedStep(5, 2, 1, 2.5, 3, 4), overran=False)
    reader = StepReader(path)
    assert reader.sums() == (2, 1, 4.0, 0.5)
    assert [step.began_s for step in reader.steps()] == [1, 5]
    assert reader.steps(since=1) == [PacedStep(5, 2, 1, 2.5, 3, 4)]
    assert (reader.instance_id, reader.dilation) == ("p0", 2.0)


def test_the_last_steps_are_kept(tmp_path):
    log = StepLog(tmp_path / "p0.steps", 1.0)
    for number in range(step_log.KEPT_STEPS + 5):
        log.add(PacedStep(number, 1, 1, 1, 0, 1), overran=False)
    kept = StepReader(tmp_path / "p0.steps").steps()
    assert [step.began_s for step in kept] == list(range(6, step_log.KEPT_STEPS + 5))


def test_a_file_that_is_no_record_is_passed_over(tmp_path):
    (tmp_path / "p0.steps").write_bytes(b"")
    StepLog(tmp_path / "p1.steps", 1.0)
    assert [log.instance_id for log in step_log.readers(tmp_path)] == ["p1"]
