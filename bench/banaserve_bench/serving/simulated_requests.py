"""Requests of the simulator, sent to a real server, and what their records show.

Times of requests and figures are in modelled seconds; a modelled second takes ``dilation`` seconds
of the client's clock.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from banaserve.sim.instances.prefix_cache import HASH_BLOCK_TOKENS
from banaserve.sim.request import SimRequest
from banaserve.sim.result import LatencyLimits, percentile
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from banaserve_bench.loadgen.loops import open_loop
from banaserve_bench.serving.summary import output_tokens, tpot_s

_TOKEN_IDS = range(500, 40_000)


@dataclass(frozen=True, slots=True)
class CaseRequest:
    """A request: its arrival in modelled seconds, its prompt and its output length."""

    at_s: float
    prompt: list[int]
    output_tokens: int

    @classmethod
    def of(cls, request: SimRequest, seed: int) -> Self:
        """Return the request with a prompt that shares only blocks of equal hash ids."""
        prompt: list[int] = []
        for block in request.hash_ids[: request.prompt_tokens // HASH_BLOCK_TOKENS]:
            prompt += random.Random(f"{seed} block {block}").choices(
                _TOKEN_IDS, k=HASH_BLOCK_TOKENS
            )
        draws = random.Random(f"{seed} prompt {request.id}")
        prompt += draws.choices(_TOKEN_IDS, k=request.prompt_tokens - len(prompt))
        return cls(request.arrival_s, prompt, request.output_tokens)


async def send(
    client: OpenAiClient, asked: Sequence[CaseRequest], dilation: float
) -> list[RequestRecord]:
    """Send each of ``asked`` when it is due; return the records when all have ended."""
    calls = [
        CompletionCall.exact(str(n), one.prompt, one.output_tokens) for n, one in enumerate(asked)
    ]
    return await open_loop(client, calls, [one.at_s * dilation for one in asked])


def figures_of(
    records: Sequence[RequestRecord], dilation: float, limits: LatencyLimits
) -> dict[str, float]:
    """Return figures of real records, named as the simulator's; latencies count from arrival."""
    ended = [r for r in records if r.error is None and r.ended_at_s is not None]
    start_s = min(record.arrival_s for record in records)
    ttft = [((r.first_token_at_s or 0.0) - r.arrival_s) / dilation for r in ended]
    tpot = [(tpot_s(r) or 0.0) / dilation for r in ended]
    e2e = [((r.ended_at_s or 0.0) - r.arrival_s) / dilation for r in ended]
    good = sum(
        first <= limits.ttft_s and each <= limits.tpot_s
        for first, each in zip(ttft, tpot, strict=True)
    )
    total_s = max(((r.ended_at_s or 0.0) - start_s for r in ended), default=0.0) / dilation
    figures = {
        "num_requests": float(len(records)),
        "num_finished": float(len(ended)),
        "finished_fraction": len(ended) / len(records),
        "goodput_fraction": good / len(records),
        "total_s": total_s,
        "output_tokens_per_s": sum(map(output_tokens, ended)) / total_s if total_s else 0.0,
    }
    for name, values in (("ttft", sorted(ttft)), ("tpot", sorted(tpot)), ("e2e", sorted(e2e))):
        figures[f"{name}_mean_s"] = sum(values) / len(values) if values else 0.0
        figures[f"{name}_p50_s"] = percentile(values, 0.5)
        figures[f"{name}_p99_s"] = percentile(values, 0.99)
    return figures
