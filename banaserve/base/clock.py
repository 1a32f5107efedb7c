"""Time as a value that is passed in, so that the same code runs in virtual time."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Iterator
from typing import Protocol

_PART_S = 0.25
"""Length of the waits that ``wait_parts`` yields for a wait of up to ten seconds, in seconds."""
_MOST_PARTS = 40


class Clock(Protocol):
    """A monotonic clock."""

    def now(self) -> float:
        """Return the seconds since an arbitrary start; the value never decreases."""
        ...

    async def sleep(self, seconds: float) -> None:
        """Return after ``seconds`` of this clock have passed."""
        ...


class WallClock:
    """The machine's monotonic clock."""

    def now(self) -> float:
        return time.monotonic()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


def wait_parts(total_s: float) -> Iterator[float]:
    """Yield the lengths of the short waits of which a wait of ``total_s`` seconds consists.

    A short wait that ends late counts only with its length: while the whole machine stands still,
    a peer cannot answer either. A second wait for the same deadline has to extend it.
    """
    part_s = max(_PART_S, total_s / _MOST_PARTS)
    while total_s > part_s:
        yield part_s
        total_s -= part_s
    yield max(0.0, total_s)
