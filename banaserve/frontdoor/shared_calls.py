"""Expensive calls, made one at a time, with one result for all callers that wait for it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
T = TypeVar("T")
_LONGEST_REST_S = 1.0


class TooManyCallsError(Exception):
    """Error: too many different calls are waiting; ask again later."""


class SharedCalls(Generic[K, T]):
    """Queue of calls: makes one call at a time, and pauses after each in proportion to its time.

    All callers that ask for the same waiting call share its result. A result is never older than
    the question.

    Args:
        make: Makes a call.
        max_waiting: Maximum number of different calls that wait.
        rest: Length of the pause after a call, as a multiple of the call's time.
    """

    def __init__(
        self, make: Callable[[K], Awaitable[T]], max_waiting: int = 16, rest: float = 4.0
    ) -> None:
        self._make = make
        self._max_waiting = max_waiting
        self._rest = rest
        self._waiting: dict[K, asyncio.Future[T]] = {}
        self._worker: asyncio.Task[None] | None = None

    async def get(self, key: K) -> T:
        """Return the result of a call that begins after this question.

        Raises:
            TooManyCallsError: The call would have to wait for too many others.
        """
        answer = self._waiting.get(key)
        if answer is None:
            if len(self._waiting) >= self._max_waiting:
                raise TooManyCallsError
            answer = self._waiting[key] = asyncio.get_running_loop().create_future()
            if self._worker is None or self._worker.done():
                self._worker = asyncio.create_task(self._work())
        return await asyncio.shield(answer)

    async def _work(self) -> None:
        now = asyncio.get_running_loop().time
        while self._waiting:
            key = next(iter(self._waiting))
            answer, began_s = self._waiting.pop(key), now()
            try:
                answer.set_result(await self._make(key))
            except Exception as failure:
                answer.set_exception(failure)
                answer.exception()  # marked as retrieved: all callers may have been cancelled
            await asyncio.sleep(min(_LONGEST_REST_S, self._rest * (now() - began_s)))
