"""Answers of paced engines, compared with those of one vLLM engine."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.pacing import miniatures
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.loops import closed_loop
from banaserve_bench.loadgen.servers import vllm_server

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
