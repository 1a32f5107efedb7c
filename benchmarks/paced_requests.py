"""Requests of the simulator's cases to paced engines, and what their records show.

Times of requests and figures are in modelled seconds; a modelled second takes ``dilation`` seconds
on the wall.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.pacing import miniatures
from banaserve.sim.request import SimRequest
from banaserve.sim.result import LatencyLimits, percentile
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from banaserve_bench.loadgen.loops import closed_loop, open_loop
from banaserve_bench.loadgen.servers import vllm_server
from banaserve_bench.serving.summary import output_tokens, tpot_s

_TOKEN_IDS = range(500, 40_000)
_NAME = "one-engine"
_PLAIN_OPTIONS = (
    "--dtype",
    "float32",
    "--enforce-eager",
    "--kv-cache-memory-bytes",
    str(256 << 20),
)
Answer = tuple[list[int], list[int]]
"""Tokens of a prompt, and tokens of its greedy answer."""


@dataclass(frozen=True, slots=True)
class CaseRequest:
    """A request: its arrival in modelled seconds, its prompt and its output length."""

    at_s: float
    prompt: list[int]
    output_tokens: int

    @classmethod
    def of(cls, request: SimRequest, seed: int) -> Self:
        """Return the request with a prompt that it shares with no other."""
        draws = random.Random(f"{seed} prompt {request.id}")
        prompt = draws.choices(_TOKEN_IDS, k=request.prompt_tokens)
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
    start_s = min(_due_s(record) for record in records)
    ttft = [((r.first_token_at_s or 0.0) - _due_s(r)) / dilation for r in ended]
    tpot = [(tpot_s(r) or 0.0) / dilation for r in ended]
    e2e = [((r.ended_at_s or 0.0) - _due_s(r)) / dilation for r in ended]
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


def _due_s(record: RequestRecord) -> float:
    return record.sent_at_s if record.due_at_s is None else record.due_at_s


def sampled(total: int, count: int) -> list[int]:
    """Return the indices of ``count`` of ``total`` requests, spread evenly."""
    count = min(count, total)
    return [place * total // count for place in range(count)]


def num_equal(profile: Profile, answers: Sequence[Answer]) -> int:
    """Return how many ``answers`` one vLLM engine with the profile's miniature gives too."""
    model = miniatures.resolve(profile, print)
    calls = [
        CompletionCall.exact(str(n), prompt, len(answer))
        for n, (prompt, answer) in enumerate(answers)
    ]
    # The model's maximum context may not fit into the cache, which is sized for these few answers.
    longest = max(len(prompt) + len(answer) for prompt, answer in answers)
    options = (*_PLAIN_OPTIONS, "--max-model-len", str(longest + 1))
    with vllm_server(model.path_or_id, _NAME, *options) as server:
        expected = asyncio.run(_ask(server.url, calls))
    return sum(one == answer for one, (_, answer) in zip(expected, answers, strict=True))


async def _ask(url: str, calls: Sequence[CompletionCall]) -> list[list[int]]:
    async with OpenAiClient(url, _NAME, return_token_ids=True) as client:
        return [record.token_ids for record in await closed_loop(client, calls, 4)]
