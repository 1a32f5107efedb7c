"""Tokens are those of one vLLM engine, whatever way a request takes. Greedy and seeded, float32."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from banaserve import models
from banaserve.bench import workloads
from banaserve.bench.client import Call, OpenAiClient
from banaserve.bench.loops import closed_loop
from banaserve.bench.servers import Server, banaserve_server

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
FLOAT32 = ("--dtype", "float32", "--kv-store-size", "1536MiB")


def data_folder() -> Path | None:
    """The workloads beside the checkout, where there are any."""
    named = os.environ.get("BANASERVE_DATA")
    beside = Path(__file__).parents[3] / "shared" / "data"
    return Path(named) if named else beside if beside.is_dir() else None


def real_prompts(tokenize: Callable[[str], list[int]]) -> list[list[int]]:
    """22 short instructions and 10 texts of 1,000 to 4,000 tokens."""
    data = data_folder()
    kinds = ("alpaca", "longbench") if data else ("synthetic", "synthetic")
    shapes = [
        (kinds[0], 22, 5, 80),
        (kinds[1], 7, 1000, 1200),
        (kinds[1], 2, 1800, 2200),
        (kinds[1], 1, 3500, 4000),
    ]
    found = []
    for number, (kind, count, low, high) in enumerate(shapes):
        found += workloads.prompts(kind, count, low, high, SEED + number, tokenize, data)
    return [tokenize(prompt.text) for prompt in found]


@pytest.fixture(scope="module")
def model() -> models.ResolvedModel:
    return models.resolve(models.PACKAGED, None, print)


@pytest.fixture(scope="module")
def prompts(model: models.ResolvedModel) -> list[list[int]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model.path_or_id)
    return real_prompts(lambda text: tokenizer(text, verbose=False)["input_ids"])


@pytest.fixture(scope="module")
def reference(
    model: models.ResolvedModel, prompts: list[list[int]], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, list[list[int]]]:
    folder = tmp_path_factory.mktemp("reference")
    job = {"model": model.path_or_id, "prompts": prompts, "samplings": SAMPLINGS}
    (folder / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("reference_tokens.py")
    command = [sys.executable, str(script), str(folder / "job.json"), str(folder / "out.json")]
    ran = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr[-2000:]
    return json.loads((folder / "out.json").read_text())


def ask(
    server: Server, prompts: list[list[int]], sampling: dict[str, object], stream_concurrency: int
) -> list[list[int]]:
    """The token ids of the streamed answers, in the order of the prompts."""
    extra = {k: v for k, v in sampling.items() if k not in ("max_tokens", "temperature")}
    calls = [
        Call(
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


@pytest.mark.parametrize("shape", ["1:1", "2:2"])
def test_tokens_equal_one_engine(
    shape: str, prompts: list[list[int]], reference: dict[str, list[list[int]]]
) -> None:
    with banaserve_server(models.PACKAGED, "--pd", shape, *FLOAT32) as server:
        for name, sampling in SAMPLINGS.items():
            answers = ask(server, prompts, sampling, stream_concurrency=8)
            different = [i for i, a in enumerate(answers) if a != reference[name][i]]
            assert different == [], f"{name} at --pd {shape}: other tokens for prompts {different}"
        num_requests = 2 * len(prompts)
        assert server.metric("banaserve_first_tokens_total", leg="prefill") > 0
        assert server.metric("banaserve_first_tokens_total", leg="decode") >= len(prompts)
        for decode in ["d0", "d1"][: int(shape[-1])]:
            computed = server.metric("banaserve_prompt_tokens_computed_total", instance_id=decode)
            short = sum(len(tokens) for tokens in prompts if len(tokens) <= 32)
            assert computed <= num_requests + 2 * short


def test_a_prefix_computed_on_one_prefill_instance_is_read_by_the_other(
    prompts: list[list[int]],
) -> None:
    prefix = max(prompts, key=len)[:1920]
    suffix = prompts[0] + prompts[1]
    options = ("--pd", "2:1", "--routing-policy", "round_robin", "--dtype", "float32")
    sampling = {"temperature": 0.0}
    with banaserve_server(models.PACKAGED, *options) as server:

        def computed() -> dict[str, float]:
            name = "banaserve_prompt_tokens_computed_total"
            return {p: server.metric(name, instance_id=p) for p in ("p0", "p1")}

        ask(server, [prefix], sampling, 1)
        first = computed()
        (cold,) = [p for p, tokens in first.items() if tokens == 0]
        ask(server, [prefix + suffix], sampling, 1)
        second = computed()
        assert first[next(p for p in first if p != cold)] == len(prefix)
        # Whole blocks are shared: the new part, and nothing of the 15 blocks before it.
        assert second[cold] == len(suffix)


def test_a_seed_gives_the_same_tokens_however_the_prompt_is_cut(
    prompts: list[list[int]], reference: dict[str, list[list[int]]]
) -> None:
    chosen = [i for i, tokens in enumerate(prompts) if 1000 <= len(tokens) <= 1200][:2]
    options = ("--colocated", "1", "--dtype", "float32", "--max-num-batched-tokens", "256")
    with banaserve_server(models.PACKAGED, *options) as server:
        answers = ask(server, [prompts[i] for i in chosen], SAMPLINGS["seeded"], 2)
    assert answers == [reference["seeded"][i] for i in chosen]
