"""Throughput that one forecast loses beside another."""

from __future__ import annotations

from math import inf

import pytest

from banaserve.elastic.forecast import Forecast
from banaserve.elastic.slowdown import slowdown

ARRIVALS_S = tuple(float(second) for second in range(41))


def ending(*ends_s: float) -> Forecast:
    return Forecast((0.0,) * len(ends_s), ARRIVALS_S[: len(ends_s)], ends_s)


def at_rate(share: float, wait_s: float = 1.0) -> Forecast:
    """One that takes ``1 / share`` of a second for what arrives in one."""
    return ending(*(at_s / share + wait_s for at_s in ARRIVALS_S))


@pytest.mark.parametrize(("own", "other", "wanted"), [(0.5, 1.0, 1.0), (0.8, 1.0, 0.25)])
def test_later_and_later_is_slower(own: float, other: float, wanted: float) -> None:
    assert slowdown(at_rate(own), at_rate(other)) == pytest.approx(wanted)
    assert slowdown(at_rate(other), at_rate(own)) == pytest.approx(-wanted)


def test_who_keeps_up_is_not_slower_however_long_each_takes() -> None:
    assert slowdown(at_rate(1.0, wait_s=30.0), at_rate(1.0)) == pytest.approx(0.0)


def test_what_is_still_to_come_at_the_beginning_says_nothing() -> None:
    late = [at_s + (100.0 if at_s <= 10 else 1.0) for at_s in ARRIVALS_S]
    assert slowdown(ending(*late), at_rate(1.0)) == pytest.approx(0.0)


def test_requests_that_never_end_are_time_lost() -> None:
    half = [inf if number % 2 else at_s + 1.0 for number, at_s in enumerate(ARRIVALS_S)]
    assert slowdown(ending(*half), at_rate(1.0)) == pytest.approx(0.5)
    assert slowdown(at_rate(1.0), ending(*half)) == pytest.approx(-0.5)
    nothing = ending(*(inf for _ in ARRIVALS_S))
    assert slowdown(nothing, at_rate(1.0)) == 1.0
    assert slowdown(nothing, nothing) == 0.0


def test_nothing_arrives() -> None:
    assert slowdown(ending(), ending()) == 0.0
    assert slowdown(ending(3.0), ending(2.0)) == 0.0
