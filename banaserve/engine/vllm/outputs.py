"""Where a leg's outputs wait for the client."""

from __future__ import annotations

from vllm.outputs import PoolingRequestOutput, RequestOutput

from banaserve.engine.vllm import compat


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
