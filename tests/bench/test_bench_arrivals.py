"""Arrival times: seeded, ascending, with the mean and variation they were asked."""

from __future__ import annotations

from itertools import pairwise
from statistics import fmean, pstdev

import pytest

from banaserve.base.errors import UserError
from banaserve_bench.loadgen.arrivals import arrival_times_s, gamma, poisson, trace


@pytest.mark.parametrize("variation", [0.5, 1.0, 3.0])
def test_gamma_has_the_rate_and_the_variation(variation: float) -> None:
    times_s = gamma(4.0, variation, 20_000, seed=1)
    gaps_s = [b - a for a, b in pairwise([0.0, *times_s])]
    assert min(gaps_s) >= 0
    assert fmean(gaps_s) == pytest.approx(0.25, rel=0.1)
    assert pstdev(gaps_s) / fmean(gaps_s) == pytest.approx(variation, rel=0.1)


def test_equal_seeds_give_equal_arrivals() -> None:
    assert poisson(2.0, 50, seed=5) == poisson(2.0, 50, seed=5)
    assert poisson(2.0, 50, seed=5) != poisson(2.0, 50, seed=6)


@pytest.mark.parametrize(
    ("count", "rate_per_s", "expected"),
    [
        (3, None, [0.0, 2.0, 3.0]),
        (3, 4.0, [0.0, 1 / 3, 0.5]),
        (1, 9.0, [0.0]),
        (4, None, [0.0, 2.0, 3.0, 7.0]),
    ],
)
def test_trace(count: int, rate_per_s: float | None, expected: list[float]) -> None:
    assert trace([10, 13, 12, 17], count, rate_per_s) == pytest.approx(expected)


def test_kinds() -> None:
    assert arrival_times_s("closed", 3) is None
    assert arrival_times_s("poisson", 3, seed=1, rate_per_s=2.0) == poisson(2.0, 3, 1)
    assert arrival_times_s("gamma", 3, seed=1, rate_per_s=2.0, variation=2.0) == gamma(
        2.0, 2.0, 3, 1
    )
    assert arrival_times_s("trace", 2, trace_s=[1.0, 4.0]) == [0.0, 3.0]


@pytest.mark.parametrize(
    ("kind", "given", "words"),
    [
        ("poison", {}, "did you mean poisson"),
        ("poisson", {}, "need a rate"),
        ("poisson", {"rate_per_s": 0.0}, "more than 0"),
        ("gamma", {"rate_per_s": 1.0, "variation": -1.0}, "a variation of -1.0"),
        ("gamma", {"rate_per_s": 1.0, "variation": 1e200}, r"a variation of 1e\+200"),
        ("trace", {}, "need a file"),
        ("trace", {"trace_s": [1.0]}, "has 1 arrivals"),
        ("trace", {"trace_s": [1.0, 1.0], "rate_per_s": 1.0}, "longer than 0 s"),
    ],
)
def test_what_cannot_be(kind: str, given: dict[str, object], words: str) -> None:
    with pytest.raises(UserError, match=words):
        arrival_times_s(kind, 2, **given)  # type: ignore[arg-type]
