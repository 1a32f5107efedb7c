"""What the pipeline's benchmark reads out of traces and waits."""

from __future__ import annotations

import random
from math import nan

import pytest

from benchmarks.pipeline import measured_break_even, times_of
from benchmarks.prefix_ttft import whole_blocks
from depth import chosen_seed


@pytest.mark.parametrize("noise", [0.0, 0.02])
def test_break_even_is_found_from_the_waits_below_it(noise: float) -> None:
    draws = random.Random(chosen_seed(2))
    num_bytes, compute_s = 60e6, 1.5
    waits = [
        (bandwidth, (num_bytes / bandwidth - compute_s) * (1 + draws.uniform(-noise, noise)))
        for bandwidth in (16e6, 24e6, 32e6)
    ]
    assert measured_break_even(waits) == pytest.approx(num_bytes / compute_s, rel=2 * noise + 1e-9)


def trace(layers: list[list[float]], forward_s: float) -> dict[str, object]:
    return {
        "step": 1,
        "began_s": 100.0,
        "forward_s": forward_s,
        "computed_s": 104.0,
        "ended_s": 104.5,
        "fetched_blocks": 4,
        "layers": layers,
    }


def test_a_pipelined_step() -> None:
    # load, loaded, wait, waited, attended, save, saved
    layers = [
        [100.1, 100.6, 100.1, 100.6, 101.0, 101.0, 101.2],
        [100.6, 101.1, 102.0, 102.0, 103.0, 104.0, 104.4],
    ]
    times = times_of(trace(layers, forward_s=100.1))
    assert times.fetch_s == pytest.approx(1.0)
    assert times.store_s == pytest.approx(0.6)
    assert times.fetch_wait_s == pytest.approx(0.5)
    assert times.store_wait_s == pytest.approx(0.5)
    assert times.step_s == pytest.approx(4.5)
    assert times.compute_s == pytest.approx(3.5)
    assert (times.transfer_s, times.visible_s) == pytest.approx((1.6, 1.0))
    assert times.fetched_blocks == 4


def test_a_serial_step_waits_before_the_forward_pass() -> None:
    layers = [
        [100.1, 100.6, 101.2, 101.2, 101.3, nan, nan],
        [100.6, 101.1, 102.0, 102.0, 103.0, nan, nan],
    ]
    times = times_of(trace(layers, forward_s=101.1))
    assert times.fetch_wait_s == pytest.approx(1.0)
    assert times.store_s == 0.0


def test_a_step_that_fetches_nothing_waits_for_nothing() -> None:
    layers = [[nan, nan, 100.2, 100.2, 101.0, 101.0, 101.5]]
    times = times_of(trace(layers, forward_s=100.0))
    assert (times.fetch_s, times.fetch_wait_s) == (0.0, 0.0)


@pytest.mark.parametrize(("percent", "tokens"), [(0, 0), (50, 8 * 128), (90, 14 * 128)])
def test_shares_are_whole_blocks(percent: int, tokens: int) -> None:
    assert whole_blocks(2000, percent) == tokens
