"""Which blocks are worth fetching: tables of cases."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from banaserve.kvstore.daemon.tiering.promotion_choice import TierSpeed, choose

MIB = 2**20


def speed(latency_s: float, bytes_per_s: float) -> TierSpeed:
    """A tier that has been measured with loads of one to eight blocks."""
    learnt = TierSpeed()
    for number in (1, 2, 4, 8):
        learnt.learn(number * MIB, latency_s + number * MIB / bytes_per_s)
    return learnt


def offer(latency_s: float, block_s: float, queued_blocks: int = 0) -> tuple[TierSpeed, int]:
    return speed(latency_s, MIB / block_s), queued_blocks * MIB


def test_latency_and_bandwidth_are_told_apart() -> None:
    learnt = speed(0.010, 100 * MIB)
    assert learnt.predict_s(0) == pytest.approx(0.010)
    assert learnt.predict_s(50 * MIB) == pytest.approx(0.510)


def test_nothing_is_predicted_before_the_first_load() -> None:
    learnt = TierSpeed()
    assert learnt.predict_s(MIB) == 0.0


def test_loads_of_one_size_teach_their_mean() -> None:
    learnt = TierSpeed()
    for seconds in (0.9, 1.1) * 20:
        learnt.learn(MIB, seconds)
    assert learnt.predict_s(2 * MIB) == pytest.approx(2.0, rel=0.02)


def test_a_tier_that_has_become_slower_is_noticed() -> None:
    learnt = speed(0.0, 1000 * MIB)
    for number in (1, 2, 4, 8) * 20:
        learnt.learn(number * MIB, number / 10)
    assert learnt.predict_s(10 * MIB) == pytest.approx(1.0, rel=0.05)


@given(
    samples=st.lists(
        st.tuples(st.integers(1, 2**40), st.floats(0.0, 1e4)), min_size=1, max_size=30
    ),
    queued_bytes=st.integers(0, 2**45),
)
def test_a_prediction_is_never_negative(
    samples: list[tuple[int, float]], queued_bytes: int
) -> None:
    learnt = TierSpeed()
    for num_bytes, seconds in samples:
        learnt.learn(num_bytes, seconds)
    assert learnt.predict_s(queued_bytes) >= 0.0
    assert learnt.predict_s(2 * queued_bytes) >= learnt.predict_s(queued_bytes)


FAST, SLOW = offer(0.0, 1.0), offer(2.0, 10.0)


@pytest.mark.parametrize(
    ("sources", "offers", "compute_block_s", "wait_s", "num_blocks"),
    [
        pytest.param([0] * 5, [FAST], 1.5, 0.0, 5, id="cheaper-to-fetch"),
        pytest.param([0] * 5, [FAST], 0.5, 0.0, 0, id="cheaper-to-compute"),
        pytest.param([0] * 5, [FAST], 0.0, 0.0, 5, id="unknown-cost"),
        pytest.param([0], [offer(2.0, 1.0)], 1.5, 0.0, 0, id="latency-too-long-for-one"),
        pytest.param([0] * 9, [offer(2.0, 1.0)], 1.5, 0.0, 9, id="but-not-for-nine"),
        pytest.param([0] * 4, [offer(0.0, 1.0, 20)], 2.0, 0.0, 0, id="long-queue"),
        pytest.param([0] * 4, [offer(0.0, 1.0, 20)], 2.0, 20.0, 4, id="waiting-anyway"),
        pytest.param([0, 0, 1, 1], [FAST, SLOW], 2.0, 0.0, 2, id="only-the-fast-tiers-part"),
        pytest.param([1, 0, 0, 0], [FAST, SLOW], 4.0, 0.0, 4, id="side-by-side"),
        pytest.param([0] * 3, [(TierSpeed(), 0)], 0.001, 0.0, 3, id="never-measured"),
        pytest.param([], [FAST], 1.0, 0.0, 0, id="nothing-there"),
    ],
)
def test_the_choice(
    sources: list[int],
    offers: list[tuple[TierSpeed, int]],
    compute_block_s: float,
    wait_s: float,
    num_blocks: int,
) -> None:
    assert choose(sources, offers, MIB, compute_block_s, wait_s) == num_blocks


@given(
    sources=st.lists(st.integers(0, 1), max_size=12),
    latency_s=st.floats(0.0, 5.0),
    block_s=st.floats(0.01, 5.0),
    queued=st.integers(0, 10),
    compute_block_s=st.floats(0.001, 5.0),
    wait_s=st.floats(0.0, 5.0),
)
def test_no_other_number_saves_more(
    sources: list[int],
    latency_s: float,
    block_s: float,
    queued: int,
    compute_block_s: float,
    wait_s: float,
) -> None:
    offers = [offer(latency_s, block_s, queued), FAST]

    def saved_s(number: int) -> float:
        fetch_s = wait_s
        for tier, (tier_speed, queued_bytes) in enumerate(offers):
            if num_blocks := sources[:number].count(tier):
                ahead_bytes = queued_bytes + num_blocks * MIB
                fetch_s = max(fetch_s, tier_speed.predict_s(ahead_bytes))
        return number * compute_block_s - (fetch_s - wait_s)

    best = choose(sources, offers, MIB, compute_block_s, wait_s)
    assert saved_s(best) >= max(saved_s(number) for number in range(len(sources) + 1)) - 1e-9
