"""Where a leg's outputs wait for the client, and how a stream of them is read in time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from typing import TypeVar

from vllm.outputs import PoolingRequestOutput, RequestOutput

from banaserve.engine.vllm import compat

Output = TypeVar("Output")


class Outputs(compat.RequestOutputCollector):
    """vLLM's collector, in which an error waits behind the output that has come before it.

    In vLLM's it takes the output's place. A stream that goes on elsewhere would lack that text.
    """

    _error: Exception | None = None

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        if isinstance(output, Exception) and isinstance(self.output, RequestOutput):
            self._error = self._error or output
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
