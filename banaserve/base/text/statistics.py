"""Mean of a few independent runs, with its interval. Pure."""

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
