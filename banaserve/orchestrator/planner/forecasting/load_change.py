"""Statistics of a load, and the test whether two stretches of time have different loads."""

from __future__ import annotations

from collections.abc import Sequence
from math import sqrt
from typing import NamedTuple

from banaserve.base.types import ObservedRequest


class Moments(NamedTuple):
    """Number of samples of a quantity, their mean and their variance."""

    num_samples: int
    mean: float
    variance: float

    def differs(self, other: Moments, least_fraction: float, deviations: float) -> bool:
        """Return whether the two means differ by more than chance and by more than a share of them.

        Student's test of two samples with a pooled variance, dominated by the larger sample.

        Args:
            least_fraction: Least difference, as a share of the larger mean.
            deviations: Least difference, in standard deviations of chance.
        """
        count = self.num_samples + other.num_samples
        gap = abs(self.mean - other.mean)
        if count < 4 or gap <= least_fraction * max(self.mean, other.mean):
            return False
        squares = (self.num_samples - 1) * self.variance + (other.num_samples - 1) * other.variance
        chance = sqrt(squares / (count - 2) * (1 / self.num_samples + 1 / other.num_samples))
        return gap > deviations * chance


class LoadStats(NamedTuple):
    """Load of a stretch of time.

    Attributes:
        requests: Arrivals per second.
        prompt_tokens: Prompt tokens to compute that arrive per second.
        prompt_length: Prompt tokens to compute of each request.
    """

    requests: Moments
    prompt_tokens: Moments
    prompt_length: Moments

    def differs(self, other: LoadStats, least_fraction: float, deviations: float) -> bool:
        """Return whether the two loads differ."""
        return any(
            one.differs(two, least_fraction, deviations)
            for one, two in zip(self, other, strict=True)
        )


def load_stats(requests: Sequence[ObservedRequest], start_s: float, end_s: float) -> LoadStats:
    """Return the load of those ``requests`` that arrived from ``start_s`` to ``end_s``.

    The samples of the rates are equal stretches of about a second, at least two: their variance is
    larger if requests arrive in bursts.
    """
    num_bins = max(2, round(end_s - start_s))
    width_s = (end_s - start_s) / num_bins
    counts, tokens = [0.0] * num_bins, [0.0] * num_bins
    lengths = []
    for request in requests:
        if start_s <= request.arrival_s < end_s:
            place = min(num_bins - 1, int((request.arrival_s - start_s) / width_s))
            length = request.prompt_tokens - request.cached_tokens
            counts[place] += 1 / width_s
            tokens[place] += length / width_s
            lengths.append(float(length))
    return LoadStats(_moments(counts), _moments(tokens), _moments(lengths))


def _moments(values: Sequence[float]) -> Moments:
    count = len(values)
    if count < 2:
        return Moments(1, values[0] if values else 0.0, 0.0)
    mean = sum(values) / count
    return Moments(count, mean, sum((value - mean) ** 2 for value in values) / (count - 1))
