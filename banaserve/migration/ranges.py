"""Runs of neighbouring numbers."""

from __future__ import annotations

from collections.abc import Iterable


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Join neighbouring numbers: return ``(first, count)`` of each run, ascending."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and sum(found[-1]) == number:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found
