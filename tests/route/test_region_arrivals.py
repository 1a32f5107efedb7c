"""Load that follows the day, traces, and long documents over regions."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

import pytest

from banaserve.base.errors import UserError
from banaserve.sim.trace import read_trace
from banaserve_route.sim.arrivals import diurnal, replay
from banaserve_route.sim.world import RegionSystem, Setting, simulate
from client_programs import shared_prefixes

TOOLS = shared_prefixes(5, 800, 100, 40, 1.1)
FAR = {("us", "eu"): 90.0}


def test_arrivals_follow_the_day_and_regions_have_their_own():
    us, eu = (diurnal(TOOLS, 2.0, 0.9, 1000.0, peak_s, 4000.0, seed=1) for peak_s in (250.0, 750.0))
    for arrivals, peak_s in ((us, 250.0), (eu, 750.0)):
        assert len(arrivals) == pytest.approx(8000, rel=0.05)
        assert all(one[0] < other[0] for one, other in pairwise(arrivals))
        near = sum(abs(at_s % 1000.0 - peak_s) < 250.0 for at_s, _ in arrivals)
        # Over the half around the peak the mean is 1 + 0.9 x 2 / pi of the whole.
        assert near / len(arrivals) == pytest.approx(0.5 + 0.9 / 3.14159, abs=0.03)
    with pytest.raises(UserError, match="swing_fraction is 2: give 0 to 1"):
        diurnal(TOOLS, 1.0, 2.0, 10.0, 0.0, 10.0, 1)


def test_a_region_s_night_helps_with_another_s_day():
    days = {
        name: diurnal(TOOLS, 3.0, 1.0, 60.0, peak_s, 60.0, seed=1)
        for name, peak_s in (("us", 15.0), ("eu", 45.0))
    }
    setting = Setting({"us": 1, "eu": 1}, {}, FAR, duration_s=120.0, arrivals=days)
    alone, together = (
        simulate(setting, RegionSystem("skywalker", forwards=forwards), 1)
        for forwards in (False, True)
    )
    assert len(alone.records) == len(together.records) == sum(map(len, days.values()))
    assert together.num_censored == 0
    assert together.ttft_s(0.9) < alone.ttft_s(0.9)


def test_a_trace_is_replayed_with_its_prefixes_at_its_own_pace(tmp_path):
    path = tmp_path / "trace.jsonl"
    path.write_text(
        '{"timestamp": 0, "input_length": 1500, "output_length": 64, "hash_ids": [1, 2, 3]}\n'
        '{"timestamp": 9000, "input_length": 1800, "output_length": 32, "hash_ids": [1, 2, 4, 5]}\n'
        '{"timestamp": 19000, "input_length": 900, "output_length": 32, "hash_ids": [7, 8]}\n'
    )
    rows = read_trace(path)
    setting = Setting({"us": 1}, {}, arrivals={"us": replay(rows)})
    first, second, third = simulate(setting, RegionSystem("round_robin"), 1).records
    assert [one.sent_s for one in (first, second, third)] == [0.0, 9.0, 19.0]
    assert [one.prompt_tokens for one in (first, second, third)] == [1488, 1792, 896]
    assert [one.hit_tokens for one in (first, second, third)] == [0, 1024, 0]
    slower = replace(setting, arrivals={"us": replay(rows, time_scale=2.0, max_tokens=1000)})
    cut = simulate(slower, RegionSystem("round_robin"), 1).records
    assert [one.sent_s for one in cut] == [0.0, 18.0, 38.0]
    assert max(one.prompt_tokens + one.output_tokens for one in cut) <= 1000
