"""Gains of moved modules in closed form, and the comparison in the simulator."""

from __future__ import annotations

import re

import pytest

from banaserve.orchestrator.control.costs import profile as profiles
from banaserve_bench.results import result
from benchmarks.break_even import page
from benchmarks.break_even.command import figures
from benchmarks.break_even.gains import (
    PROFILES,
    Point,
    best_gain,
    break_even_bytes_per_s,
    full_point,
    gains,
    older_gain,
    points,
    prompt_gain,
    switch_gain,
    with_link,
)
from benchmarks.break_even.simulated import Compared, Question, compared
from benchmarks.location import ROOT

OPT = profiles.load("opt-13b-a100")
H100 = profiles.load("llama-3.1-8b-h100")


def test_heads_by_hand() -> None:
    """A quarter of the heads of 8 requests: a quarter of the attention, less 32 round trips."""
    point = Point(8, 32_000)
    step_s = 6.5e-3 + 8 * 32_000 * 5.2e-8 + 8 * 31.6e-6
    quarter_s = 8 * 32_000 * 5.2e-8 / 4
    trip_bytes = 8 * (2 + 2 * 4) * 2 * 128 * 2
    hop_s = 32 * (2 * 20e-6 + trip_bytes / 50e9)
    (heads,) = [one for one in gains(H100, point) if one.kind == "heads"]
    assert heads.share == 0.25  # half of them would leave the guest too little memory
    assert heads.speed == pytest.approx(step_s / (step_s - quarter_s + hop_s) - 1, rel=1e-3)
    assert switch_gain(H100, point).step_s == pytest.approx(step_s)


@pytest.mark.parametrize("name", PROFILES)
def test_what_holds_of_every_profile(name: str) -> None:
    profile = profiles.load(name)
    found = list(points(profile))
    assert found
    for point in found:
        layers, heads, older = gains(profile, point)
        # Layers relieve no step that decodes; older blocks never relieve as much as heads.
        assert layers.speed <= 0
        assert older.speed < max(heads.speed, 0.0) or older.speed < 0
        assert break_even_bytes_per_s(profile, "layers", point) is None
        assert switch_gain(profile, point).mixed_step_s > switch_gain(profile, point).step_s


def test_a_break_even_is_where_the_sign_changes() -> None:
    point = Point(64, 2000)
    at = break_even_bytes_per_s(H100, "heads", point)
    assert at is not None
    assert best_gain(with_link(H100, 1.1 * at), "heads", point).speed > 0
    older = break_even_bytes_per_s(H100, "older blocks", point)
    assert older is not None
    assert older > at
    assert older_gain(with_link(H100, older / 1.1), point).speed < 0


def test_memory_is_full_where_the_batch_is_allowed() -> None:
    assert full_point(OPT, 2000) == Point(33, 2000)
    assert full_point(OPT, 8000) is None
    assert full_point(H100, 500) is None
    room = best_gain(OPT, "heads", Point(33, 2000)).room
    assert room > best_gain(OPT, "heads", Point(33, 2000)).speed > 0


def test_the_simulator_compares_everything_on_one_load(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.break_even.simulated.DURATION_S", 5.0)
    monkeypatch.setattr("benchmarks.break_even.simulated._SAMPLE", 10)
    monkeypatch.setattr("benchmarks.break_even.simulated._TRIES", 1)
    asked = Question("opt-13b-a100", 2, (600, 50), (2.0, 0.1), 25e9)
    found = compared(asked)
    assert len(found.plain) == 5
    # Half of the layers or heads leave a guest too little memory.
    assert len(found.moved) == 8
    assert all("1 prefill, 1 decode" in name for name in found.moved)
    assert compared(asked) == found


def test_prompts_in_long_steps_gain_by_layers_away() -> None:
    gained = [prompt_gain(OPT, "layers", tokens) for tokens in (512, 2048, 8192)]
    assert gained == sorted(gained)
    assert gained[0] < 0.05 < gained[1]
    at = break_even_bytes_per_s(OPT, "layers", 2048)
    assert at is not None
    assert prompt_gain(with_link(OPT, at / 1.1), "layers", 2048) < 0 < gained[1]


def test_the_page_has_all_its_parts() -> None:
    record = result.read(ROOT / "benchmarks" / "results" / "break-even.json")
    text = page.page(record)
    assert not re.findall(r"{\w+}", text)
    for name in PROFILES:
        gain, worth_it = (record.figures[f"{kind}.{name}"] for kind in ("gain", "worth_it"))
        num_worth_it = round(worth_it.median * len(gain.samples))
        assert f"{num_worth_it} of {len(gain.samples)} on {name} (at most {gain.max:+.3f})" in text


def test_figures_count_what_is_worth_it() -> None:
    asked = Question("opt-13b-a100", 2, (600, 50), (2.0, 0.1), 25e9)
    found = [Compared(asked, 1.0, {"a": 0.5, "b": 0.7}, {"c": best}) for best in (0.6, 0.71, 0.8)]
    shown = figures(found)
    assert shown["gain.opt-13b-a100"][0] == pytest.approx([-0.1, 0.01, 0.1])
    assert shown["worth_it.opt-13b-a100"][0] == [1 / 3]
