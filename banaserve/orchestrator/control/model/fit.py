"""Linear fit updated with each measurement. Pure: a fit is a value; a sample gives a new one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

_ERROR_WEIGHT = 0.1
"""Weight of one sample in the smoothed prediction error: about the last twenty samples count."""

_NOISE = 0.05
"""Relative standard deviation of a measurement, which limits the influence of one sample."""


@dataclass(frozen=True, slots=True)
class LinearFit:
    """y = sum c_i x_i, a Kalman filter whose coefficients drift slowly.

    Attributes:
        coefficients: Coefficients c_i, in seconds for one unit of x_i.
        covariance: Covariance matrix of the coefficients, row by row.
        ceiling: Maximum standard errors, however long a kind of work is not observed.
        num_samples: Number of measurements so far.
        error_fraction: Smoothed mean of |predicted - measured| / measured, with predictions made
            before their measurement.
    """

    coefficients: tuple[float, ...]
    covariance: tuple[tuple[float, ...], ...]
    ceiling: tuple[float, ...]
    num_samples: int = 0
    error_fraction: float = 0.0

    @classmethod
    def of(cls, coefficients: Sequence[float], doubt: float = 1.0) -> LinearFit:
        """Return a fit with the initial estimate ``coefficients``.

        Args:
            doubt: Relative standard error of the estimate; 1 is an error of its own size.

        Raises:
            ValueError: A coefficient is zero: give its possible size, even a small one.
        """
        if not all(coefficients):
            raise ValueError("a first coefficient of zero never moves: give its size")
        errors = tuple(doubt * abs(c) for c in coefficients)
        rows = [
            tuple(error**2 if i == j else 0.0 for j in range(len(errors)))
            for i, error in enumerate(errors)
        ]
        return cls(tuple(coefficients), tuple(rows), errors)

    def predict(self, features: Sequence[float]) -> float:
        """Return the predicted value, never below 0."""
        return max(0.0, _dot(self.coefficients, features))

    def observed(self, features: Sequence[float], value: float, drift: float = 0.01) -> LinearFit:
        """Return the fit after one measurement.

        Errors are relative to ``value``, so that one long step does not outweigh a hundred short
        ones.

        Args:
            drift: Relative change of a coefficient from one sample to the next, as a standard
                deviation; 0 never forgets.

        Raises:
            ValueError: The value is not above 0, or the number of features differs.
        """
        if value <= 0:
            raise ValueError(f"a measurement of {value} is not above 0")
        if len(features) != len(self.coefficients):
            raise ValueError(f"{len(features)} features for {len(self.coefficients)} coefficients")
        before = self._drifted(drift)
        raw = _dot(self.coefficients, features)
        direction = [_dot(row, features) for row in before]
        noise = (_NOISE * value) ** 2 + _dot(direction, features)
        covariance = tuple(
            tuple(cell - left * right / noise for cell, right in zip(row, direction, strict=True))
            for row, left in zip(before, direction, strict=True)
        )
        coefficients = tuple(
            c + d / noise * (value - raw) for c, d in zip(self.coefficients, direction, strict=True)
        )
        error = abs(max(0.0, raw) - value) / value
        weight = max(_ERROR_WEIGHT, 1 / (self.num_samples + 1))
        smoothed = self.error_fraction + weight * (error - self.error_fraction)
        samples = self.num_samples + 1
        return LinearFit(coefficients, covariance, self.ceiling, samples, smoothed)

    def _drifted(self, drift: float) -> list[list[float]]:
        """Return the covariance one sample later, its standard errors limited to the ceiling."""
        rows = [list(row) for row in self.covariance]
        scales = []
        for i, ceiling in enumerate(self.ceiling):
            rows[i][i] += (drift * self.coefficients[i]) ** 2
            scales.append(min(1.0, ceiling / rows[i][i] ** 0.5) if rows[i][i] > 0 else 1.0)
        return [
            [cell * scales[i] * scales[j] for j, cell in enumerate(row)]
            for i, row in enumerate(rows)
        ]


def _dot(left: Sequence[float], right: Sequence[float]) -> float:
    return sum(a * b for a, b in zip(left, right, strict=True))
