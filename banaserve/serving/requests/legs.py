"""Forms of the two legs of a request, as they are sent to engines."""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import Iterator
from typing import Any

from banaserve.base.errors import DeadlineExceededError
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.requests import (
    PoolingRequestOutput,
    RequestOutput,
    RequestOutputKind,
    SamplingParams,
)
from banaserve.engine.connector.handover import Handover
from banaserve.engine.continuation import with_output
from banaserve.serving.instances.instance import DRAINED


def prefill_leg(
    request: compat.EngineCoreRequest, keeps_token: bool, handover: Handover
) -> compat.EngineCoreRequest:
    """Return the prefill leg: one output token, and the prompt's KV left in the store.

    Args:
        keeps_token: True if the token is the answer's first one; otherwise it is discarded, and
            sampled in the cheapest way.
    """
    leg = copy.copy(request)
    leg.request_id = f"{request.request_id}-p"
    leg.external_req_id = f"{request.external_req_id}-p"
    given = request.sampling_params
    assert given is not None
    if keeps_token:
        params = copy.copy(given)
        params.min_tokens = min(given.min_tokens, 1)
        params.stop = []
        params.output_text_buffer_length = 0
    else:
        params = SamplingParams(temperature=0.0, ignore_eos=True, watermarking=False)
    params.max_tokens = 1
    params.detokenize = False
    params.output_kind = RequestOutputKind.FINAL_ONLY
    params.extra_args = _with_handover(given, handover)
    leg.sampling_params = params
    return leg


def decode_leg(
    request: compat.EngineCoreRequest, tokens: list[int], handover: Handover | None
) -> compat.EngineCoreRequest:
    """Return the decode leg: the request, to be continued after the output ``tokens``.

    Args:
        tokens: Output tokens so far, which the leg includes.
        handover: Facts about the prompt's KV in the store; None if the engine finds out itself.
    """
    leg = copy.copy(request)
    given = request.sampling_params
    assert given is not None
    params = copy.copy(given)
    if handover is not None and len(tokens) > 1:
        # After a death the store has whole blocks of prompt and output: all of them are looked up.
        handover = Handover(keep_s=handover.keep_s) if handover.keep_s else None
    if handover is not None:
        params.extra_args = _with_handover(given, handover)
    if tokens:
        params.extra_args = with_output(params.extra_args, tokens)
        params.prompt_logprobs = None  # already sent to the client
    leg.sampling_params = params
    return leg


def _with_handover(params: SamplingParams, handover: Handover) -> dict[str, Any]:
    return {**(params.extra_args or {}), "kv_transfer_params": handover.to_params()}


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
        elif not isinstance(self.output, Exception):
            super().put(output)
        # Of errors, the first is kept: after one that ends the answer, outputs are lost.
        elif isinstance(self.output, LegMovedError) and isinstance(output, RequestOutput):
            self._error, self.output = self.output, output

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
