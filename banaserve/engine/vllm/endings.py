"""How a request ends that no instance could bring to its end."""

from __future__ import annotations

import logging
from http import HTTPStatus

from vllm.exceptions import GracefulHTTPError

from banaserve.engine.vllm import metrics

logger = logging.getLogger(__name__)

MAX_DEATHS = 3
"""So many instances may die one after the other under a request that comes no further."""


class EnginesDiedError(GracefulHTTPError):
    """Instances have died under a request: tried again and again, it may take down all."""

    def __init__(self) -> None:
        super().__init__(
            f"{MAX_DEATHS} instances died one after the other under this request, which may be "
            "the cause: it is not tried again",
            HTTPStatus.INTERNAL_SERVER_ERROR,
        )


def out_of_time() -> GracefulHTTPError:
    """Counts a request whose deadline has passed; returns what its client is told."""
    metrics.DEADLINES.inc()
    return GracefulHTTPError(
        "the request ran out of its time budget (--request-timeout)", HTTPStatus.GATEWAY_TIMEOUT
    )


def given_up(request_id: str | None) -> EnginesDiedError:
    """Counts and names a request that may be what instances die of; returns what is told."""
    metrics.GIVEN_UP.inc()
    logger.error("request %s is given up: %d instances died under it", request_id, MAX_DEATHS)
    return EnginesDiedError()
