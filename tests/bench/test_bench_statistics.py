"""Statistics against numbers known from elsewhere."""

from __future__ import annotations

import pytest

from banaserve_bench.results.statistics import (
    mean_interval,
    median,
    paired_ratios,
    percentile,
    spread_fraction,
)


@pytest.mark.parametrize(
    ("samples", "expected"), [([5], 5), ([3, 1, 2], 2), ([4, 1, 3, 2], 2.5), ([-1, -3], -2)]
)
def test_median(samples: list[float], expected: float) -> None:
    assert median(samples) == expected


@pytest.mark.parametrize(
    ("percent", "expected"), [(0, 15), (5, 16), (30, 23), (40, 29), (50, 35), (100, 50)]
)
def test_percentile(percent: float, expected: float) -> None:
    """The five values of the usual textbook example, by linear interpolation."""
    assert percentile([15, 20, 35, 40, 50], percent) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("samples", "expected"),
    [([2], 0), ([0, 0], 0), ([9, 10, 12], 0.3), ([-1, 0, 1], float("inf"))],
)
def test_spread(samples: list[float], expected: float) -> None:
    assert spread_fraction(samples) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("samples", "half"),
    [
        # Student's t times s / sqrt(n), by hand: 12.706 * 0.70711 / 1.41421.
        ([1.0, 2.0], 6.353),
        # 2.776 * 1.58114 / 2.23607.
        ([1.0, 2.0, 3.0, 4.0, 5.0], 1.963),
        ([7.0, 7.0, 7.0], 0.0),
    ],
)
def test_mean_interval(samples: list[float], half: float) -> None:
    low, mean, high = mean_interval(samples)
    assert mean == pytest.approx(sum(samples) / len(samples))
    assert high - mean == pytest.approx(half, abs=1e-3)
    assert mean - low == pytest.approx(half, abs=1e-3)


def test_mean_interval_between_tabulated_values_is_not_too_narrow() -> None:
    """28 degrees of freedom: t is 2.048; the tabulated 25 give 2.060."""
    samples = [float(n) for n in range(29)]
    low, _, high = mean_interval(samples)
    assert (high - low) / 2 == pytest.approx(2.060 * 8.5147 / 29**0.5, rel=1e-3)


def test_one_run_has_no_interval() -> None:
    with pytest.raises(ValueError, match="two samples"):
        mean_interval([1.0])


def test_paired_ratios() -> None:
    assert paired_ratios([2.0, 3.0], [1.0, 6.0]) == [2.0, 0.5]


@pytest.mark.parametrize(
    ("ours", "theirs", "words"),
    [([1.0], [], "paired"), ([1.0], [0.0], "above 0"), ([1.0], [float("nan")], "above 0")],
)
def test_no_ratio(ours: list[float], theirs: list[float], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        paired_ratios(ours, theirs)


@pytest.mark.parametrize("samples", [[], [float("nan")]])
def test_no_samples(samples: list[float]) -> None:
    for statistic in (median, spread_fraction, lambda values: percentile(values, 50)):
        with pytest.raises(ValueError, match="sample"):
            statistic(samples)


def test_percentile_out_of_range() -> None:
    with pytest.raises(ValueError, match="0 to 100"):
        percentile([1.0], 101)
