"""Sequences of one request (``n`` > 1): each runs, fails and continues independently.

vLLM fans such a request out inside one engine. Here each sequence is a request with one sequence.
As in vLLM, the seed of a sequence is the request's seed plus the sequence's index. The prompt is
computed once: the other sequences begin when the first one's prefill leg has left the prompt's KV
in the store.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
from collections.abc import AsyncGenerator, Sequence

from banaserve.engine.vllm.compat.requests import RequestOutput, RequestOutputKind
from banaserve.engine.vllm.monitoring.leg_stats import Sequences
from banaserve.engine.vllm.requests.disagg_request import run_request
from banaserve.engine.vllm.requests.request_context import RequestContext
from banaserve.engine.vllm.requests.router import Router


def sequences_of(context: RequestContext) -> Sequence[RequestContext]:
    """Return a context for each sequence; ``context`` itself if there is only one."""
    params = context.request.sampling_params
    assert params is not None
    if params.n == 1:
        return (context,)
    context.sequences = Sequences(params.n)
    return [_sequence(context, index) for index in range(params.n)]


def _sequence(context: RequestContext, index: int) -> RequestContext:
    made = copy.copy(context)
    made.request = copy.copy(context.request)
    made.request.request_id = f"{index}_{context.request.request_id}"
    params = copy.copy(context.request.sampling_params)
    assert params is not None
    params.n = 1
    if params.seed is not None:
        params.seed += index
    made.request.sampling_params = params
    made.is_sibling, made.has_siblings = index > 0, index == 0
    made.prompt_leg_ended = asyncio.Event()
    return made


def run_sequences(
    sequences: Sequence[RequestContext], router: Router
) -> AsyncGenerator[RequestOutput, None]:
    """Run all sequences and yield their outputs as vLLM does.

    Outputs are yielded one by one as they arrive, or merged into one at the end if the request
    wants final output only.

    Raises:
        Exception: Error of the first sequence that cannot continue; the others are cancelled.
    """
    if len(sequences) == 1:
        return run_request(sequences[0], router)
    return _run_several(sequences, router)


async def _run_several(
    sequences: Sequence[RequestContext], router: Router
) -> AsyncGenerator[RequestOutput, None]:
    params = sequences[0].request.sampling_params
    assert params is not None
    merged = _Merged(len(sequences), params.output_kind is RequestOutputKind.FINAL_ONLY)
    tasks = [
        asyncio.create_task(_run(sequences, index, router, merged))
        for index in range(len(sequences))
    ]
    try:
        while (output := await merged.get()) is not None:
            yield output
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        first = sequences[0]
        router.lookups.end_hold(first.hold, first.hold_stores)  # some readers may never have begun


async def _run(
    sequences: Sequence[RequestContext], index: int, router: Router, merged: _Merged
) -> None:
    first, own = sequences[0], sequences[index]
    try:
        if index > 0:
            await first.prompt_leg_ended.wait()
            own.prefilled, own.num_cached_tokens = first.prefilled, first.num_cached_tokens
            own.num_created_tokens = first.num_created_tokens
            own.weights = first.weights
            own.hold, own.hold_stores, own.reader = first.hold, first.hold_stores, index
            own.computed_by = first.computed_by
        async with contextlib.aclosing(run_request(own, router)) as outputs:
            async for output in outputs:
                merged.put(index, output)
    except Exception as failure:
        merged.fail(failure)
    finally:
        first.prompt_leg_ended.set()  # or the others would wait forever after a failure


class _Merged:
    """Outputs of several sequences, merged into those of one request."""

    def __init__(self, num_sequences: int, is_final_only: bool) -> None:
        self._queue: asyncio.Queue[RequestOutput | Exception] = asyncio.Queue()
        self._is_final_only = is_final_only
        self._finished: list[RequestOutput | None] = [None] * num_sequences
        self._num_open = num_sequences

    def put(self, index: int, output: RequestOutput) -> None:
        output.outputs[0].index = index
        if output.finished:
            self._finished[index] = output
            self._num_open -= 1
        output.finished = self._num_open == 0
        if not self._is_final_only:
            self._queue.put_nowait(output)
        elif output.finished:
            ended = [one for one in self._finished if one is not None]
            whole = copy.copy(ended[0])
            whole.outputs = [one.outputs[0] for one in ended]
            whole.finished = True
            self._queue.put_nowait(whole)

    def fail(self, failure: Exception) -> None:
        self._queue.put_nowait(failure)

    async def get(self) -> RequestOutput | None:
        """Return the next output; None after the last. Raises the error of a failed sequence."""
        if self._num_open == 0 and self._queue.empty():
            return None
        found = await self._queue.get()
        if isinstance(found, Exception):
            raise found
        return found
