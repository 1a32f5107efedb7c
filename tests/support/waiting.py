"""Waiting for what other processes, threads and tasks do: the only loops that ask again."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterator

DEADLINE_S = 60.0
_FIRST_S, _LAST_S = 0.001, 0.02


def eventually(
    holds: Callable[[], object], what: str = "", deadline_s: float = DEADLINE_S
) -> float:
    """Return once ``holds``: the seconds that it took.

    Args:
        holds: The condition.
        what: Name of the condition, for the failure.
        deadline_s: Longest time to wait.
    """
    began_s = time.monotonic()
    pauses_s = _pauses_s()
    while not holds():
        elapsed_s = time.monotonic() - began_s
        assert elapsed_s < deadline_s, f"not within {deadline_s:.0f} s: {what or holds}"
        time.sleep(next(pauses_s))
    return time.monotonic() - began_s


async def until(holds: Callable[[], object], deadline_s: float = DEADLINE_S) -> None:
    """Return once ``holds``, while other tasks of the loop go on."""
    pauses_s = _pauses_s()
    async with asyncio.timeout(deadline_s):
        while not holds():  # noqa: ASYNC110
            await asyncio.sleep(next(pauses_s))


async def turns(holds: Callable[[], object], most: int = 1000) -> None:
    """Return once ``holds``, which needs nothing but turns of this loop."""
    for _ in range(most):
        if holds():
            return
        await asyncio.sleep(0)
    raise AssertionError(f"not within {most} turns of the loop: {holds}")


def _pauses_s() -> Iterator[float]:
    """Short at first, since most waits are, and longer for what takes processor time to ask."""
    pause_s = _FIRST_S
    while True:
        yield pause_s
        pause_s = min(1.5 * pause_s, _LAST_S)


def lasts(seconds: float) -> None:
    """Let time of a random scenario pass: how long a harm lasts, how far two are apart.

    For such times alone: no check may count on what has happened when it is over.
    """
    time.sleep(seconds)


async def thinks(seconds: float) -> None:
    """The same for a client or a server double of a random scenario, between two things it does."""
    await asyncio.sleep(seconds)
