"""Time as a value that is passed in, so that the same code runs in virtual time."""

from __future__ import annotations

import asyncio
import time
from typing import Protocol


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
