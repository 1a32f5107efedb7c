"""Suspects: requests that instances may die of. They are retried one at a time, or given up.

When an instance dies, all of its requests fail, the cause among them. Retried together, they would
fail together again, until all of them are given up. Retried one at a time, all but the cause make
progress, so that only the cause is given up.
"""

from __future__ import annotations

import asyncio
import logging
from http import HTTPStatus

from banaserve.engine.compat.requests import GracefulHTTPError
from banaserve.serving.monitoring import metrics

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""Number of instance deaths after which a request that ran alone is given up.

A request that ran beside others is given up one death later. Instances are given up only after more
deaths than that.
"""
_SUSPECT_DEATHS = 2
"""Number of instance deaths without progress after which a request waits for a turn to retry."""


class EnginesDiedError(GracefulHTTPError):
    """Error of a request that is not retried, since it may be what its instances died of.

    Retried without end, such a request could kill all instances.
    """

    def __init__(self, num_deaths: int) -> None:
        super().__init__(
            f"{num_deaths} instances died one after the other under this request, which may be "
            "the cause: it is not tried again",
            HTTPStatus.INTERNAL_SERVER_ERROR,
        )


def given_up(request_id: str | None, num_deaths: int) -> EnginesDiedError:
    """Count and log a request that instances may die of; return the error for its client."""
    metrics.GIVEN_UP.inc()
    logger.error("request %s is given up: %d instances died under it", request_id, num_deaths)
    return EnginesDiedError(num_deaths)


class Suspicion:
    """Suspicion that instances die of one request, until the request makes progress.

    Progress is a number that grows with the end of the prefill leg and with each output token.

    Attributes:
        num_deaths: Number of instances that died under the request since its last progress.
        num_beside: Number of requests in flight on its instance, itself included.
        turn: Lock that the request holds while no other suspect may run; None if it has no turn.
    """

    def __init__(self) -> None:
        self.num_deaths = 0
        self.num_beside = 1
        self.turn: asyncio.Lock | None = None
        self._blame = 0.0
        self._furthest = 0

    def died(self, progress: int) -> None:
        """Record that an instance died under the request, which may be the cause.

        All requests on the instance share the blame equally. A request in its turn gets at least
        half of it: the others had made progress since the last death, or had just begun. Progress
        since the last death clears earlier deaths and blame.
        """
        if progress > self._furthest:
            self.num_deaths, self._blame, self._furthest = 0, 0.0, progress
        self.num_deaths += 1
        self._blame += 1.0 / (self.num_beside if self.turn is None else min(self.num_beside, 2))

    def must_wait(self, progress: int) -> bool:
        """Return whether instances died under the request and it has made no progress since."""
        return self.num_deaths >= _SUSPECT_DEATHS and progress <= self._furthest

    @property
    def is_certain(self) -> bool:
        """True if the request is probably what instances die of, so that it is not retried."""
        return self.num_deaths >= MAX_DEATHS and self._blame >= 1.0

    async def wait_for_turn(self, turns: asyncio.Lock, deadline: float) -> None:
        """Wait until no other suspect runs.

        Raises:
            TimeoutError: The deadline passed while other requests had their turns.
        """
        async with asyncio.timeout_at(deadline):
            await turns.acquire()
        self.turn = turns

    def has_progressed(self, progress: int) -> None:
        """End the turn if the request has made progress since an instance last died under it."""
        if progress > self._furthest:
            self.end_turn()

    def end_turn(self) -> None:
        """Let the next suspect run. Idempotent."""
        turn, self.turn = self.turn, None
        if turn is not None:
            turn.release()
