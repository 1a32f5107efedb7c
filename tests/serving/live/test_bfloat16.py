"""Tokens are those of one vLLM engine in bfloat16 too; greedy, one request at a time.

Requests of one batch round each other's sums otherwise, which bfloat16 shows in the tokens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest

from banaserve.base import models
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.loops import closed_loop
from fork_server import ForkServer
from reference import reference_tokens, tokenizer
from server_run import Run

pytestmark = pytest.mark.e2e

OUTPUT_TOKENS = 16
BFLOAT16 = ("--model", models.PACKAGED, "--pd", "1:1", "--dtype", "bfloat16")
TEXTS = (
    "The capital of France is",
    "Once upon a time there was a little girl who",
    "List the planets of the solar system in order, and say of each how large it is:",
    "The history of the Roman Empire began " + "and then the empire grew larger. " * 30,
    "def fibonacci(n):\n    if n < 2:\n        return n\n    return",
    "A letter to a friend who moved away. " + "The weather has been fine. " * 60,
    ", ".join(map(str, range(1, 90))) + ",",
    "The quick brown fox jumps over the lazy dog. " * 6,
)


@pytest.fixture(scope="module")
def model() -> models.ResolvedModel:
    return models.resolve(models.PACKAGED, None, print)


@pytest.fixture(scope="module")
def prompts(model: models.ResolvedModel) -> list[list[int]]:
    return list(map(tokenizer(model.path_or_id), TEXTS))


def ask(server: Run, prompts: list[list[int]]) -> list[list[int]]:
    """The token ids of the streamed answers, in the order of the prompts."""
    calls = [
        CompletionCall(
            str(number),
            prompt=tokens,
            max_tokens=OUTPUT_TOKENS,
            temperature=0.0,
            extra={"ignore_eos": True},
        )
        for number, tokens in enumerate(prompts)
    ]

    async def run() -> list[list[int]]:
        async with OpenAiClient(server.url, "smollm2-135m", return_token_ids=True) as client:
            records = await closed_loop(client, calls, 1)
        assert [record.error for record in records] == [None] * len(records)
        return [record.token_ids for record in records]

    return asyncio.run(run())


def test_tokens_equal_one_engine(
    fork_server: ForkServer,
    serve: Callable[..., Run],
    model: models.ResolvedModel,
    prompts: list[list[int]],
) -> None:
    sampling = {"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    expected = reference_tokens(
        fork_server, model.path_or_id, prompts, {"greedy": sampling}, dtype="bfloat16", alone=True
    )["greedy"]
    server = serve(*BFLOAT16)
    assert "bfloat16: given by --dtype" in server.log_path.read_text()
    assert ask(server, prompts) == expected
    assert server.metric("banaserve_first_tokens_total", leg="prefill") > 0
    name = "banaserve_prompt_tokens_computed_total"
    # What the store holds is found again: a token a request, and the short prompts.
    assert server.metric(name, instance_id="d0") < sum(map(len, prompts)) / 2
    # Blocks of the first turn are fetched, by both legs.
    assert ask(server, prompts) == expected
    assert server.end() == 0
