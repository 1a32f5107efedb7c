"""Statistics of samples that a benchmark reports. Pure."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from banaserve.base.text.statistics import as_samples


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
