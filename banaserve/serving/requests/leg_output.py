"""Outputs of one leg on their way to the reader, and the errors that end it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Iterator
from typing import TypeVar

from banaserve.base.errors import DeadlineExceededError
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.requests import PoolingRequestOutput, RequestOutput
from banaserve.serving.instance import DRAINED

Output = TypeVar("Output")


class LegMovedError(Exception):
    """Error that ends a leg which is to continue at another instance.

    Attributes:
        reason: Reason of the move: ``drained`` if the leg's instance is being drained or replaced,
            ``rebalanced`` if another instance has fewer requests.
    """

    def __init__(self, reason: str = DRAINED) -> None:
        super().__init__(reason)
        self.reason = reason


class LegOutputCollector(compat.RequestOutputCollector):
    """vLLM's collector of outputs, with errors queued behind an output that came before.

    In vLLM's collector, an error replaces the unread output; a stream that continues elsewhere
    would lose the output's text.
    """

    output: RequestOutput | PoolingRequestOutput | Exception | None
    _error: Exception | None = None

    def put(self, output: RequestOutput | PoolingRequestOutput | Exception) -> None:
        if isinstance(output, Exception) and isinstance(self.output, RequestOutput):
            self._error = self._error or output
        elif isinstance(self.output, LegMovedError):
            # Outputs that arrive until the reader leaves are kept; of errors, the first is.
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

    def move(self, reason: str) -> None:
        """End the leg here, since it is to continue at another instance."""
        self.put(LegMovedError(reason))

    @contextlib.contextmanager
    def expiring(self, deadline: float) -> Iterator[None]:
        """Wake the reader with an error if the deadline passes within the block."""
        timer = asyncio.get_running_loop().call_at(deadline, self.put, DeadlineExceededError())
        try:
            yield
        finally:
            timer.cancel()

    def _raise_next(self) -> None:
        error, self._error = self._error, None
        if error is not None:
            super().put(error)


async def next_output(stream: AsyncGenerator[Output, None], deadline: float) -> Output | None:
    """Return the next output of ``stream``; None after the last.

    The timeout does not enclose a yield, since different tasks may ask for the outputs.

    Args:
        deadline: Deadline on the event loop's clock, in seconds.

    Raises:
        TimeoutError: The deadline has passed.
    """
    async with asyncio.timeout_at(deadline):
        return await anext(stream, None)
