"""Pace of validation: requests whose validation blocks the event loop are validated in turn."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from http import HTTPStatus
from time import monotonic

from banaserve.frontdoor.bodies.bounds import BodyRefusedError

LEAST_S = 0.05
"""Validation time below which nothing is delayed, in seconds: streams are sent in steps of about
this length."""
FRACTION = 0.2
MAX_WAIT_S = 10.0


class ValidationPace:
    """Pacer of slow validations: all together take at most ``FRACTION`` of the event loop's time.

    vLLM validates a request on the event loop and holds Python's lock, so that a thread would not
    help other requests' streams.

    Args:
        clock: Returns monotonic seconds.
        sleep: Waits for a number of seconds.
    """

    def __init__(
        self,
        clock: Callable[[], float] = monotonic,
        sleep: Callable[[float], Awaitable[object]] = asyncio.sleep,
    ) -> None:
        self._clock, self._sleep = clock, sleep
        self._free_s = 0.0

    async def wait(self, cost_s: float) -> None:
        """Wait until a validation that takes ``cost_s`` seconds may begin.

        Raises:
            BodyRefusedError: The validation would have to wait for others for too long.
        """
        if cost_s < LEAST_S:
            return
        now_s = self._clock()
        begins_s = max(now_s, self._free_s)
        if begins_s - now_s > MAX_WAIT_S:
            raise BodyRefusedError(
                HTTPStatus.SERVICE_UNAVAILABLE,
                "validation",
                "too many requests with very many parts or token ids wait; try again shortly",
            )
        self._free_s = begins_s + cost_s / FRACTION
        if begins_s > now_s:
            await self._sleep(begins_s - now_s)
