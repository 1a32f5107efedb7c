"""Outputs of one leg on their way to the reader, and the errors that end it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

from banaserve.engine.vllm.compat import engine as compat
from banaserve.engine.vllm.compat.requests import PoolingRequestOutput, RequestOutput
from banaserve.engine.vllm.instance import DRAINED

Output = TypeVar("Output")


class LegMovedError(Exception):
    """A leg is to go on at another instance.

    Attributes:
        reason: ``drained``: its instance is being drained or replaced; ``rebalanced``: another has
            fewer requests.
    """

    def __init__(self, reason: str = DRAINED) -> None:
        super().__init__(reason)
        self.reason = reason


class LegOutputCollector(compat.RequestOutputCollector):
    """vLLM's collector, in which an error waits behind the output that has come before it.

    In vLLM's it takes the output's place. A stream that goes on elsewhere would lack that text.
    """

    output: RequestOutput | PoolingRequestOutput | Exception | None
    _error: Exception | None = None

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        if isinstance(output, Exception) and isinstance(self.output, RequestOutput):
            self._error = self._error or output
        elif isinstance(self.output, LegMovedError):
            # What the engine puts out until the reader leaves counts; of errors the first does.
            if isinstance(output, RequestOutput):
                self._error, self.output = self.output, output
        else:
            super().put(output)

    async def get(self) -> RequestOutput | PoolingRequestOutput:
        output = await super().get()
        self._raise_next()
        return output

    def get_nowait(self) -> RequestOutput | PoolingRequestOutput | None:
        output = super().get_nowait()
        self._raise_next()
        return output

    def _raise_next(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            super().put(error)


async def next_output(stream: AsyncGenerator[Output, None], deadline: float) -> Output | None:
    """The next one, None after the last.

    The deadline is never around a yield: each output may be asked for by another task.

    Args:
        deadline: On the event loop's clock.

    Raises:
        TimeoutError: It has passed.
    """
    async with asyncio.timeout_at(deadline):
        return await anext(stream, None)
