"""An OpenAI server in virtual time whose engine takes the time of known coefficients."""

from __future__ import annotations

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

from aiohttp import web

from banaserve_bench.plan.probe.fit import MeasuredStep, StepFit


class LoopClock:
    """Clock of the running event loop, which may be virtual."""

    def now(self) -> float:
        return asyncio.get_running_loop().time()

    async def sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)


@dataclass
class _Stream:
    prompt_tokens: int
    output_tokens: int
    computed: int = 0
    generated: int = 0
    tokens: asyncio.Queue[int] = field(default_factory=asyncio.Queue)


class ModelledServer:
    """Steps as vLLM plans them: decoding requests first, then prompts up to ``step_tokens``.

    Attributes:
        slowdown: Factor of the time of each step.
        prompts: Prompts of all requests, in the order of their arrival.
    """

    def __init__(self, fit: StepFit, seed: int, noise: float, step_tokens: int = 2048) -> None:
        self.slowdown = 1.0
        self.prompts: list[list[int]] = []
        self._fit = fit
        self._draws = Random(seed)
        self._noise = noise
        self._step_tokens = step_tokens
        self._streams: list[_Stream] = []
        self._has_work = asyncio.Event()

    async def start(self, path: Path) -> web.AppRunner:
        """Listen at the Unix socket ``path``; data on it arrive at once, so that time is exact."""
        app = web.Application()
        app.router.add_post("/v1/completions", self._complete)
        runner = web.AppRunner(app)
        await runner.setup()
        await web.UnixSite(runner, str(path)).start()
        return runner

    async def run(self) -> None:
        """Take steps for ever."""
        while True:
            await self._has_work.wait()
            await self._step()

    @property
    def num_requests(self) -> int:
        return len(self._streams)

    async def _step(self) -> None:
        decoding = [one for one in self._streams if one.computed == one.prompt_tokens]
        left, tokens, pairs = self._step_tokens - len(decoding), 0, 0
        chunks: list[tuple[_Stream, int]] = []
        for one in self._streams:
            if chunk := min(left, one.prompt_tokens - one.computed):
                chunks.append((one, chunk))
                pairs += chunk * (chunk + 2 * one.computed)
                tokens, left = tokens + chunk, left - chunk
        await asyncio.sleep(self._step_s(tokens, pairs, decoding))
        for one, chunk in chunks:
            one.computed += chunk
        for one in [*decoding, *(s for s, _ in chunks if s.computed == s.prompt_tokens)]:
            one.generated += 1
            one.tokens.put_nowait(one.generated)
            if one.generated == one.output_tokens:
                self._streams.remove(one)
        if not self._streams:
            self._has_work.clear()

    def _step_s(self, tokens: int, pairs: int, decoding: list[_Stream]) -> float:
        batch, prefill = len(decoding), self._fit.prefill
        context = sum(one.prompt_tokens + one.generated for one in decoding)
        whole = MeasuredStep(tokens, batch, context / max(1, batch), ())
        # A step has several prompts, or a part of one: not the square of its tokens.
        step_s = self._fit.predicted_s(whole) + (pairs - tokens**2) * prefill.pair_s
        return step_s * self.slowdown * self._draws.uniform(1 - self._noise, 1 + self._noise)

    async def _complete(self, request: web.Request) -> web.StreamResponse:
        body: dict[str, Any] = await request.json()
        self.prompts.append(body["prompt"])
        stream = _Stream(len(body["prompt"]), body["max_tokens"])
        self._streams.append(stream)
        self._has_work.set()
        response = web.StreamResponse()
        await response.prepare(request)
        for _ in range(stream.output_tokens):
            token = await stream.tokens.get()
            await response.write(_event({"choices": [{"text": "x", "token_ids": [token]}]}))
        usage = {
            "prompt_tokens": stream.prompt_tokens,
            "completion_tokens": stream.output_tokens,
        }
        await response.write(_event({"choices": [], "usage": usage}) + b"data: [DONE]\n\n")
        return response


def _event(event: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(event).encode() + b"\n\n"
