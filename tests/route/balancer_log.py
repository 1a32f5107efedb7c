"""Log of a balancer, without what it says of a slow machine."""

from __future__ import annotations

from collections.abc import Iterable


def without_stalls(lines: Iterable[str]) -> list[str]:
    """Return the lines that say more than that a process has stood still."""
    return [line for line in lines if "event loop stood still" not in line]
