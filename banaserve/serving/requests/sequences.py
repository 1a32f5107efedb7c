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
from dataclasses import replace

from banaserve.base.tasks import end_tasks
from banaserve.engine.compat.requests import RequestOutput, RequestOutputKind
from banaserve.serving.monitoring.leg_stats import Sequences
from banaserve.serving.requests.disagg_request import run_request
from banaserve.serving.requests.request_context import RequestContext
from banaserve.serving.requests.router import Router
from banaserve.serving.requests.suspects import Suspicion


def sequences_of(context: RequestContext) -> list[RequestContext]:
    """Return a context for each of the request's sequences."""
    num = context.params.n
    context.sequences = Sequences(num)
    return [_sequence(context, index) for index in range(num)]


def _sequence(context: RequestContext, index: int) -> RequestContext:
    request, params = copy.copy(context.request), copy.copy(context.params)
    request.request_id = f"{index}_{request.request_id}"
    params.n = 1
    if params.seed is not None:
        params.seed += index
    request.sampling_params = params
    return replace(context, request=request, index=index, suspicion=Suspicion())


async def run_sequences(
    sequences: Sequence[RequestContext], router: Router
) -> AsyncGenerator[RequestOutput, None]:
    """Run all sequences and yield their outputs as vLLM does.

    Outputs are yielded one by one as they arrive, or merged into one at the end if the request
    wants final output only.

    Raises:
        Exception: Error of the first sequence that cannot continue; the others are cancelled.
    """
    is_final_only = sequences[0].params.output_kind is RequestOutputKind.FINAL_ONLY
    merged = _Merged(len(sequences), is_final_only)
    tasks = [
        asyncio.create_task(_run(sequences, index, router, merged))
        for index in range(len(sequences))
    ]
    try:
        while (output := await merged.get()) is not None:
            yield output
    finally:
        await end_tasks(*tasks)
        router.lookups.end_hold(sequences[0].hold)  # some readers may never have begun


async def _run(
    sequences: Sequence[RequestContext], index: int, router: Router, merged: _Merged
) -> None:
    first, own = sequences[0], sequences[index]
    try:
        if index > 0:
            await first.prompt_leg_ended.wait()
            own.prompt, own.weights = first.prompt, first.weights
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
