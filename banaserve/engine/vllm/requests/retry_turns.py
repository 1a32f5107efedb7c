"""Turns of suspects (requests that instances may die of): one suspect is retried at a time.

When an instance dies, all of its requests fail, the cause among them. Retried together, they would
fail together again, until all of them are given up. Retried one at a time, all but the cause make
progress, so that only the cause is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator


class RetryTurn:
    """Turn of a request, until the request makes progress or its attempt ends."""

    def __init__(self, turns: asyncio.Lock) -> None:
        self._turns: asyncio.Lock | None = turns

    @property
    def is_on(self) -> bool:
        """True if the turn has not ended, so that no other suspect runs."""
        return self._turns is not None

    def end(self) -> None:
        """End the turn, so that the next suspect may run. Idempotent."""
        turns, self._turns = self._turns, None
        if turns is not None:
            turns.release()


class RetryTurns:
    """Queue of turns, given in the order in which they are requested."""

    def __init__(self) -> None:
        self._turns = asyncio.Lock()

    @contextlib.asynccontextmanager
    async def turn(self, deadline: float) -> AsyncIterator[RetryTurn]:
        """Wait for a turn, and hold it until ``RetryTurn.end`` or the end of the block.

        Args:
            deadline: Deadline on the event loop's clock, in seconds.

        Raises:
            TimeoutError: The deadline passed while other requests had their turns.
        """
        async with asyncio.timeout_at(deadline):
            await self._turns.acquire()
        turn = RetryTurn(self._turns)
        try:
            yield turn
        finally:
            turn.end()
