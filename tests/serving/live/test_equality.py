"""Tokens are those of one vLLM engine, whatever way a request takes. Greedy and seeded, float32."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

import written_prompts
from banaserve.base import models
from banaserve.base.config.serve_config import DEFAULT_SKIP_PREFILL_BELOW_TOKENS
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.loops import closed_loop
from depth import IS_LONG
from fork_server import ForkServer
from reference import reference_tokens, tokenizer
from server_run import Run

pytestmark = pytest.mark.e2e

SEED = 20
OUTPUT_TOKENS = 16
SAMPLINGS = {
    "greedy": {"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True},
    "seeded": {
        "temperature": 0.8,
        "top_p": 0.95,
        "seed": 7,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
    },
}
# What is counted must not depend on which of computing and reading this machine does faster now.
FETCH = ("--kv-store-fetch", "always")
FLOAT32 = ("--model", models.PACKAGED, "--dtype", "float32", "--kv-store-size", "1536MiB", *FETCH)


def data_folder() -> Path | None:
    """The workloads beside the checkout, where there are any."""
    named = os.environ.get("BANASERVE_DATA")
    beside = Path(__file__).parents[4] / "shared" / "data"
    return Path(named) if named else beside if beside.is_dir() else None


def real_prompts(tokenize: Callable[[str], list[int]]) -> list[list[int]]:
    """Short instructions and texts of 1,000 to 2,000 tokens; in a long run 26 and six to 4,000."""
    data = data_folder()
    kinds = ("alpaca", "longbench") if data else ("synthetic", "synthetic")
    shapes = [
        (kinds[0], 26 if IS_LONG else 14, 5, 80),
        (kinds[1], 4 if IS_LONG else 2, 1000, 1200),
        (kinds[1], 1, 1950, 2200),
        *([(kinds[1], 1, 3500, 4000)] if IS_LONG else []),
    ]
    found = []
    for number, (kind, count, low, high) in enumerate(shapes):
        found += written_prompts.prompts(kind, count, low, high, SEED + number, tokenize, data)
    return [tokenize(prompt.text) for prompt in found]


@pytest.fixture(scope="module")
def model() -> models.ResolvedModel:
    return models.resolve(models.PACKAGED, None, print)


@pytest.fixture(scope="module")
def prompts(model: models.ResolvedModel) -> list[list[int]]:
    return real_prompts(tokenizer(model.path_or_id))


@pytest.fixture(scope="module")
def reference(
    fork_server: ForkServer, model: models.ResolvedModel, prompts: list[list[int]]
) -> dict[str, list[list[int]]]:
    return reference_tokens(fork_server, model.path_or_id, prompts, SAMPLINGS)


def ask(
    server: Run, prompts: list[list[int]], sampling: dict[str, object], stream_concurrency: int
) -> list[list[int]]:
    """The token ids of the streamed answers, in the order of the prompts."""
    extra = {k: v for k, v in sampling.items() if k not in ("max_tokens", "temperature")}
    calls = [
        CompletionCall(
            str(i),
            prompt=tokens,
            max_tokens=OUTPUT_TOKENS,
            temperature=float(str(sampling["temperature"])),
            extra=extra,
        )
        for i, tokens in enumerate(prompts)
    ]

    async def run() -> list[list[int]]:
        async with OpenAiClient(server.url, "smollm2-135m", return_token_ids=True) as client:
            records = await closed_loop(client, calls, stream_concurrency)
        assert [record.error for record in records] == [None] * len(records)
        return [record.token_ids for record in records]

    return asyncio.run(run())


def check_tokens(
    server: Run,
    decode_instances: list[str],
    prompts: list[list[int]],
    reference: dict[str, list[list[int]]],
) -> None:
    """Every way through the server gives the reference's tokens, and decode computes one each."""
    for name, sampling in SAMPLINGS.items():
        answers = ask(server, prompts, sampling, stream_concurrency=8)
        different = [i for i, a in enumerate(answers) if a != reference[name][i]]
        assert different == [], f"{name}: other tokens for prompts {different}"
    num_requests = 2 * len(prompts)
    assert server.metric("banaserve_first_tokens_total", leg="prefill") > 0
    for decode in decode_instances:
        computed = server.metric("banaserve_prompt_tokens_computed_total", instance_id=decode)
        short = sum(n for n in map(len, prompts) if n <= DEFAULT_SKIP_PREFILL_BELOW_TOKENS)
        assert computed <= num_requests + 2 * short, decode


@pytest.mark.spine
def test_tokens_equal_one_engine(
    serve: Callable[..., Run], prompts: list[list[int]], reference: dict[str, list[list[int]]]
) -> None:
    # Long prompts are cut into chunks, which a seed must not notice.
    server = serve("--pd", "1:1", *FLOAT32, "--max-num-batched-tokens", "512")
    check_tokens(server, ["d0"], prompts, reference)
    assert server.end() == 0


@pytest.fixture(scope="module")
def two_and_two(serve: Callable[..., Run]) -> Iterator[Run]:
    """2:2, whose prefill instances take turns; waiting requests go in Preble's order, and decode
    legs begin in groups."""
    server = serve(
        *("--pd", "2:2", "--routing-policy", "round_robin", "--scheduler", "preble"),
        *("--gather-decode", "2", *FLOAT32),
    )
    yield server
    assert server.end() == 0


def test_a_prefix_computed_on_one_prefill_instance_is_read_by_the_other(
    two_and_two: Run, prompts: list[list[int]]
) -> None:
    # Backwards, so that no other test meets it.
    prefix = max(prompts, key=len)[1919::-1]
    suffix = prompts[0] + prompts[1]
    sampling = {"temperature": 0.0}

    def computed() -> dict[str, float]:
        name = "banaserve_prompt_tokens_computed_total"
        return {p: two_and_two.metric(name, instance_id=p) for p in ("p0", "p1")}

    before = computed()
    ask(two_and_two, [prefix], sampling, 1)
    first = computed()
    (warm,) = [p for p in first if first[p] > before[p]]
    cold = "p1" if warm == "p0" else "p0"
    assert first[warm] - before[warm] == len(prefix) == 1920
    ask(two_and_two, [prefix + suffix], sampling, 1)
    # Whole blocks are shared: the new part, and nothing of the 15 blocks before it.
    assert computed() == {warm: first[warm], cold: first[cold] + len(suffix)}


def test_tokens_equal_one_engine_at_two_and_two(
    two_and_two: Run, prompts: list[list[int]], reference: dict[str, list[list[int]]]
) -> None:
    # The longest go the same way as the long ones, and took half of the time; every other one goes
    # to the same instance.
    short = [i for i, prompt in enumerate(prompts) if len(prompt) < 1500]
    some = short if IS_LONG else [*short[:6], short[-1]]
    assert max(len(prompts[i]) for i in some) > 1000
    wanted = {name: [answers[i] for i in some] for name, answers in reference.items()}
    check_tokens(two_and_two, ["d0", "d1"], [prompts[i] for i in some], wanted)
