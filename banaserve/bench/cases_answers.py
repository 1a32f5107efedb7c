"""Whether answers under load are those of one engine that has nothing else to do."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from banaserve.bench.client import Call, OpenAiClient
from banaserve.bench.loops import closed_loop
from banaserve.bench.servers import vllm_server
from banaserve.costs import miniatures
from banaserve.costs.profile import Profile

_NAME = "one-engine"
_OPTIONS = ("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(256 << 20))

Answer = tuple[list[int], list[int]]
"""Tokens of a prompt, and those of its greedy answer."""


def sampled(total: int, count: int) -> list[int]:
    """Returns the places of ``count`` of ``total`` requests, spread evenly."""
    count = min(count, total)
    return [place * total // count for place in range(count)]


def num_equal(profile: Profile, answers: Sequence[Answer]) -> int:
    """Returns how many ``answers`` the profile's miniature gives in one engine of vLLM's own."""
    model = miniatures.resolve(profile, print)
    calls = [
        Call(str(n), prompt=prompt, max_tokens=len(answer), extra={"ignore_eos": True})
        for n, (prompt, answer) in enumerate(answers)
    ]
    with vllm_server(model.path_or_id, _NAME, *_OPTIONS) as server:
        expected = asyncio.run(_ask(server.url, calls))
    return sum(one == answer for one, (_, answer) in zip(expected, answers, strict=True))


async def _ask(url: str, calls: Sequence[Call]) -> list[list[int]]:
    async with OpenAiClient(url, _NAME, return_token_ids=True) as client:
        return [record.token_ids for record in await closed_loop(client, calls, 4)]
