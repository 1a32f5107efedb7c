"""Statistics of samples that benchmarks report, and means of runs with their intervals. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

# Two-sided 95% critical values of Student's t by degrees of freedom.
_T_95 = {
    1: 12.706, 2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262,
    10: 2.228, 11: 2.201, 12: 2.179, 13: 2.160, 14: 2.145, 15: 2.131, 16: 2.120, 17: 2.110,
    18: 2.101, 19: 2.093, 20: 2.086, 25: 2.060, 30: 2.042, 40: 2.021, 60: 2.000, 120: 1.980,
}  # fmt: skip


class Interval(NamedTuple):
    """A 95% confidence interval around an estimate."""

    low: float
    estimate: float
    high: float


def mean_interval(samples: Sequence[float]) -> Interval:
    """Return the mean with its 95% interval by Student's t: for a few independent runs.

    Raises:
        ValueError: There are fewer than two samples: one run has no spread.
    """
    values = as_samples(samples)
    if len(values) < 2:
        raise ValueError("an interval needs at least two samples")
    # Between two tabulated values the smaller number of degrees of freedom errs on the wide side.
    freedom = max(f for f in _T_95 if f < len(values))
    mean = float(values.mean())
    half = _T_95[freedom] * float(values.std(ddof=1)) / len(values) ** 0.5
    return Interval(mean - half, mean, mean + half)


def as_samples(samples: Sequence[float]) -> NDArray[np.float64]:
    """Return the samples as an array.

    Raises:
        ValueError: There are none, or one is not a finite number.
    """
    values = np.asarray(samples, dtype=np.float64)
    if values.size == 0:
        raise ValueError("no samples")
    if not np.isfinite(values).all():
        raise ValueError("a sample is not a finite number")
    return values


def median(samples: Sequence[float]) -> float:
    """Return the median; the mean of the middle two for an even number of samples."""
    return float(np.median(as_samples(samples)))


def percentile(samples: Sequence[float], percent: float) -> float:
    """Return the value below which ``percent`` of the samples are, linear between two samples."""
    if not 0 <= percent <= 100:
        raise ValueError(f"percentile {percent}: give 0 to 100")
    return float(np.percentile(as_samples(samples), percent))


def spread_fraction(samples: Sequence[float]) -> float:
    """Return (maximum - minimum) / median: 0 where all runs agree, infinite at a zero median."""
    values = as_samples(samples)
    width = float(values.max() - values.min())
    middle = abs(median(samples))
    if width == 0:
        return 0.0
    return width / middle if middle else float("inf")


def paired_ratios(ours: Sequence[float], theirs: Sequence[float]) -> list[float]:
    """Return ours / theirs pair by pair, so that effects on both runs of a pair cancel out.

    Raises:
        ValueError: The lengths differ or a divisor is not above 0.
    """
    if len(ours) != len(theirs):
        raise ValueError(f"{len(ours)} samples cannot be paired with {len(theirs)}")
    if not all(value > 0 for value in theirs):
        raise ValueError("a ratio needs divisors above 0")
    return [a / b for a, b in zip(as_samples(ours).tolist(), theirs, strict=True)]
