"""Turns of requests that may be what instances die of: one at a time is tried again.

An instance that dies takes all that ran there along, the cause among them. Tried again together,
they would die together once more, until all of them are given up. One after the other each but the
cause comes further, and the cause is alone in having no excuse.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class Trial:
    """A turn; it ends when its request comes further, and at the latest with the attempt."""

    def __init__(self, turns: asyncio.Lock) -> None:
        self._turns: asyncio.Lock | None = turns

    @property
    def is_on(self) -> bool:
        """Whether no other suspect runs."""
        return self._turns is not None

    def end(self) -> None:
        """Let the next one run. May be said again."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.release()


class Trials:
    """Gives turns, in the order in which they are asked for."""

    def __init__(self) -> None:
        self._turns = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self, deadline: float) -> AsyncIterator[Trial]:
        """A turn, held until ``Trial.end`` or the end of the block.

        Args:
            deadline: On the event loop's clock.

        Raises:
            TimeoutError: It has passed while others had theirs.
        """
        async with asyncio.timeout_at(deadline):
            await self._turns.acquire()
        trial = Trial(self._turns)
        try:
            yield trial
        finally:
            trial.end()
