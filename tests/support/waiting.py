"""Waiting for what other processes, threads and tasks do."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable

DEADLINE_S = 30.0


def eventually(holds: Callable[[], bool]) -> None:
    """Return once ``holds``."""
    deadline_s = time.monotonic() + DEADLINE_S
    while not holds():
        assert time.monotonic() < deadline_s, "this never came true"
        time.sleep(0.002)


async def until(holds: Callable[[], bool]) -> None:
    """Return once ``holds``, while other tasks of the loop go on."""
    async with asyncio.timeout(DEADLINE_S):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(0.002)
