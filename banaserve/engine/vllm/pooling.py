"""Requests of pooling models: no decode, so one instance computes all of them."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncGenerator
from http import HTTPStatus
from typing import Any

from vllm.exceptions import GracefulHTTPError
from vllm.outputs import PoolingRequestOutput

from banaserve.engine.vllm import metrics
from banaserve.engine.vllm.cluster import Cluster
from banaserve.engine.vllm.endings import MAX_DEATHS, given_up, out_of_time
from banaserve.engine.vllm.journey import DEAD
from banaserve.engine.vllm.outputs import next_output


async def pool(
    cluster: Cluster, deadline: float, *request: Any, **options: Any
) -> AsyncGenerator[PoolingRequestOutput, None]:
    """Let the least busy instance compute, another one where that dies.

    Args:
        request: As vLLM's ``encode`` takes it.

    Raises:
        GracefulHTTPError: Nobody serves, or not in time, or instances die of it.
    """
    for _ in range(MAX_DEATHS):
        serving = [instance for instance in cluster.serving() if instance.llm is not None]
        if not serving:
            raise GracefulHTTPError("no instance serves", HTTPStatus.SERVICE_UNAVAILABLE)
        instance = min(serving, key=lambda i: i.view().inflight_requests)
        assert instance.llm is not None
        try:
            with instance.holding(0):
                stream = instance.llm.encode(*request, **options)
                async with contextlib.aclosing(stream):
                    while (output := await next_output(stream, deadline)) is not None:
                        yield output
            return
        except DEAD:
            metrics.RETRIES.labels("pooling").inc()
        except TimeoutError:
            raise out_of_time() from None
    raise given_up(str(request[-1]))
