"""Straight line through measured times, learnt online."""

from __future__ import annotations

_MEMORY = 0.99
"""Factor by which the weight of a sample falls with each later one."""


class Line:
    """Online least squares y = base + slope x; neither is ever negative.

    Attributes:
        base: Time in ms at x = 0.
        slope: Time in ms for each unit of x.
    """

    def __init__(self, slope: float, unit: float) -> None:
        """Start from ``slope``, with the weight of one sample at ``unit`` from the mean of x."""
        self.slope, self.base = slope, 0.0
        self._assumed, self._prior = slope, unit * unit
        self._count = self._x = self._y = self._xx = self._xy = 0.0

    def __call__(self, x: float) -> float:
        """Return the predicted y."""
        return self.base + self.slope * x

    def learn(self, x: float, y: float) -> None:
        """Add one sample."""
        self._count = count = _MEMORY * self._count + 1
        self._x = sum_x = _MEMORY * self._x + x
        self._y = sum_y = _MEMORY * self._y + y
        self._xx = xx = _MEMORY * self._xx + x * x
        self._xy = xy = _MEMORY * self._xy + x * y
        mean_x, mean_y, prior = sum_x / count, sum_y / count, self._prior
        assumed = prior * self._assumed
        slope = (xy - sum_x * mean_y + assumed) / (xx - sum_x * mean_x + prior)
        slope = slope if slope > 0 else 0.0
        base = mean_y - slope * mean_x
        if base < 0:
            base, slope = 0.0, (xy + assumed) / (xx + prior)
        self.base, self.slope = base, slope
