"""Piecewise linear interpolation over measured points, and values of buckets."""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable


class Grid:
    """Values measured at points of one or more coordinates, linear in between.

    The points of a coordinate may differ with the coordinates before it. Below the first point of a
    coordinate its value holds; above the last the line through the last two continues.

    Args:
        rows: Coordinates of each measured point, then the point's value.

    Raises:
        ValueError: There is no row.
    """

    __slots__ = ("_points", "_values")

    def __init__(self, rows: Iterable[tuple[float, ...]]) -> None:
        by_point: dict[float, list[tuple[float, ...]]] = defaultdict(list)
        for point, *rest in rows:
            by_point[point].append(tuple(rest))
        if not by_point:
            raise ValueError("a grid needs a measured point")
        self._points = sorted(by_point)
        found = (by_point[point] for point in self._points)
        self._values = [below[0][0] if len(below[0]) == 1 else Grid(below) for below in found]

    def __call__(self, at: float, *rest: float) -> float:
        points, values = self._points, self._values
        above = min(bisect_left(points, at), len(points) - 1)
        upper = values[above]
        upper_value = upper(*rest) if isinstance(upper, Grid) else upper
        if above == 0 or at == points[above]:
            return upper_value
        lower = values[above - 1]
        lower_value = lower(*rest) if isinstance(lower, Grid) else lower
        weight = (at - points[above - 1]) / (points[above] - points[above - 1])
        return lower_value + weight * (upper_value - lower_value)


class Buckets:
    """Values by the upper bound of a bucket in each coordinate; 0 in a bucket without a value.

    Args:
        rows: Upper bounds of each bucket, then the bucket's value.
    """

    __slots__ = ("_bounds", "_values")

    def __init__(self, rows: Iterable[tuple[float, ...]]) -> None:
        found = {tuple(bounds): value for *bounds, value in rows}
        # Without the last bound, all that is above it is in the last bucket, too.
        self._bounds = [sorted(set(column))[:-1] for column in zip(*found, strict=True)]
        self._values = {self._place(bounds): value for bounds, value in found.items()}

    def __call__(self, *at: float) -> float:
        return self._values.get(self._place(at), 0.0)

    def _place(self, at: tuple[float, ...]) -> tuple[int, ...]:
        bounds = zip(self._bounds, at, strict=True)
        return tuple([bisect_left(known, one) for known, one in bounds])
