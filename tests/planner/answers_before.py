"""Prompts, and what a server answers them while nothing changes."""

from __future__ import annotations

import asyncio

import migration_load as loads
import small_model
import written_prompts
from banaserve.base import models
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from reference import tokenizer
from server_run import Run


def _groups(count: int) -> list[range]:
    return [range(first, min(first + 5, count)) for first in range(0, count, 5)]


class Before:
    """Prompts, and what the server answers while nothing has moved."""

    def __init__(self, server: Run) -> None:
        tokenize = tokenizer(small_model.resolve().path_or_id)
        found = written_prompts.prompts("synthetic", 10, 40, 160, 5, tokenize)
        found += written_prompts.prompts("synthetic", 4, 200, 350, 6, tokenize)
        self.prompts = [tokenize(prompt.text) for prompt in found]
        self.tokens = asyncio.run(self._ask(server))

    async def _ask(self, server: Run) -> list[list[int]]:
        answers = []
        async with OpenAiClient(server.url, models.PACKAGED, return_token_ids=True) as client:
            for some in _groups(len(self.prompts)):
                answers += await asyncio.gather(*(self._answer(client, n) for n in some))
        assert [answer.error for answer in answers if answer.error] == []
        return [list(answer.token_ids) for answer in answers]

    async def _answer(self, client: OpenAiClient, number: int) -> RequestRecord:
        prompt, extra = self.prompts[number], {"ignore_eos": True}
        call = CompletionCall(
            str(number), prompt=prompt, max_tokens=loads.OUTPUT_TOKENS, extra=extra
        )
        return await client.send(call)
