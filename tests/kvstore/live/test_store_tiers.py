"""The store with an SSD folder below it: tokens never change, whatever happens to the folder.

The tests share what they can: two servers in turn over one folder.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

import small_model
import written_prompts
from banaserve.base import models
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from fork_server import ForkServer
from observing import until, writer
from reference import reference_tokens, tokenizer
from server_run import Run

pytestmark = pytest.mark.e2e

BLOCK_TOKENS = 128
NUM_PROMPTS = 5
# The last token of a prompt is always computed.
CACHED_TOKENS = 3 * BLOCK_TOKENS - 1
OUTPUT_TOKENS = 16
# With a prompt, five blocks.
MANY_OUTPUT_TOKENS = 200
DEADLINE_S = 90.0
GREEDY = {"temperature": 0.0, "max_tokens": MANY_OUTPUT_TOKENS, "ignore_eos": True}
# Ten blocks in memory, where the prompts have fifteen.
# What is counted must not depend on which of computing and reading this machine does faster now.
STORE = (
    "--kv-store-size", "64MiB", "--kv-store-ssd-size", "2GiB", "--kv-store-fetch", "always"
)  # fmt: skip
# Nine usable blocks in the engine: three prompts, or one and a half with long answers.
TIGHT = ("--kv-cache-memory-bytes", str(60 << 20), "--max-model-len", "1024")
CHUNKED = ("--max-num-batched-tokens", "256")
ALICE, BOB = "alice", "bob"


@dataclass
class Deployment:
    """A folder that outlives the servers over it.

    Attributes:
        folder: Of the SSD tier.
        serve: Starts a server.
    """

    folder: Path
    serve: Callable[..., Run]
    server: Run | None = None

    def start(self, *options: str) -> Run:
        """End the server that runs, if any, and start another over the same folder."""
        self.stop()
        words = ("--colocated", "1", "--dtype", "float32", *STORE, *options)
        self.server = self.serve(*words, "--kv-store-ssd", str(self.folder))
        return self.server

    def running(self) -> Run:
        """The server that runs; one is started where none does."""
        return self.server or self.start(*TIGHT, *CHUNKED)

    def stop(self) -> None:
        server, self.server = self.server, None
        assert server is None or server.end() == 0

    def store_pid(self) -> int:
        assert self.server is not None
        return writer(self.server.run_dir, "kvstore")


@pytest.fixture(scope="module")
def model() -> models.ResolvedModel:
    return small_model.resolve()


@pytest.fixture(scope="module")
def prompts(model: models.ResolvedModel) -> list[list[int]]:
    """Three whole blocks each, so that decoding begins a fourth."""
    tokenize = tokenizer(model.path_or_id)
    found = written_prompts.prompts("synthetic", NUM_PROMPTS, 400, 500, 31, tokenize)
    return [tokenize(prompt.text)[: 3 * BLOCK_TOKENS] for prompt in found]


@pytest.fixture(scope="module")
def long_reference(
    fork_server: ForkServer, model: models.ResolvedModel, prompts: list[list[int]]
) -> list[list[int]]:
    return reference_tokens(fork_server, model.path_or_id, prompts, {"greedy": GREEDY})["greedy"]


@pytest.fixture(scope="module")
def reference(long_reference: list[list[int]]) -> list[list[int]]:
    return [tokens[:OUTPUT_TOKENS] for tokens in long_reference]


@pytest.fixture(scope="module")
def deployment(
    tmp_path_factory: pytest.TempPathFactory, serve: Callable[..., Run]
) -> Iterator[Deployment]:
    made = Deployment(tmp_path_factory.mktemp("tiers") / "ssd", serve)
    yield made
    made.stop()


async def stream(
    server: Run,
    prompts: list[list[int]],
    salt: str,
    concurrency: int,
    max_tokens: int = OUTPUT_TOKENS,
) -> list[RequestRecord]:
    limit = asyncio.Semaphore(concurrency)
    extra = {"ignore_eos": True, "cache_salt": salt}
    async with OpenAiClient(
        server.url, "smollm2-135m", return_token_ids=True, timeout_s=DEADLINE_S
    ) as client:

        async def one(number: int, prompt: list[int]) -> RequestRecord:
            async with limit:
                return await client.send(
                    CompletionCall(str(number), prompt=prompt, max_tokens=max_tokens, extra=extra)
                )

        return list(await asyncio.gather(*(one(i, prompt) for i, prompt in enumerate(prompts))))


def ask(
    server: Run,
    prompts: list[list[int]],
    salt: str = ALICE,
    concurrency: int = 1,
    max_tokens: int = OUTPUT_TOKENS,
) -> list[list[int]]:
    """The answers' tokens."""
    records = asyncio.run(stream(server, prompts, salt, concurrency, max_tokens))
    assert [record.error for record in records] == [None] * len(prompts)
    return [record.token_ids for record in records]


def tier(server: Run, name: str) -> float:
    return server.metric(f"banaserve_kvstore_tier_{name}", tier="ssd")


def engine(server: Run, name: str, **labels: str) -> float:
    return server.metric(f"banaserve_{name}_total", **labels)


def nothing_is_held(server: Run) -> None:
    for gauge in ("leased_slots", "writing_slots", "promoting_slots"):
        until(lambda gauge=gauge: server.metric(f"banaserve_kvstore_{gauge}") == 0, f"no {gauge}")


@pytest.mark.spine
def test_what_does_not_fit_in_memory_goes_to_ssd(
    deployment: Deployment, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    server = deployment.start()
    assert ask(server, prompts) == reference
    until(lambda: tier(server, "stores_total") >= 3 * NUM_PROMPTS, "all blocks are on SSD")
    assert server.metric("banaserve_kvstore_evictions_total") > 0
    assert engine(server, "promoted_blocks") == 0
    nothing_is_held(server)


@pytest.mark.spine
def test_after_a_restart_prefixes_come_from_ssd(
    deployment: Deployment, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    server = deployment.start(*TIGHT, *CHUNKED)
    assert ask(server, prompts) == reference
    assert engine(server, "promoted_blocks") == 3 * NUM_PROMPTS
    assert engine(server, "promotions", kind="arrived") == NUM_PROMPTS
    assert tier(server, "loads_total") == 3 * NUM_PROMPTS
    assert tier(server, "corrupt_total") == 0
    assert engine(server, "prompt_tokens_cached") == CACHED_TOKENS * NUM_PROMPTS
    nothing_is_held(server)


@pytest.mark.spine
def test_another_tenant_hits_nothing_and_the_same_one_does(
    deployment: Deployment, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    server = deployment.running()
    seen = {name: engine(server, name) for name in ("prompt_tokens_cached", "loaded_blocks")}
    loads = tier(server, "loads_total")
    assert ask(server, prompts[:2], salt=BOB) == reference[:2]
    assert {name: engine(server, name) for name in seen} == seen
    assert tier(server, "loads_total") == loads
    # Then nothing of these is left in the engine, whose cache is smaller than three prompts.
    ask(server, prompts[2:])
    cached, loaded = engine(server, "prompt_tokens_cached"), engine(server, "loaded_blocks")
    assert ask(server, prompts[:2], salt=BOB) == reference[:2]
    assert engine(server, "prompt_tokens_cached") == cached + 2 * CACHED_TOKENS
    assert engine(server, "loaded_blocks") == loaded + 2 * 3


def test_preemption_and_chunked_prefill_change_no_token(
    deployment: Deployment,
    prompts: list[list[int]],
    reference: list[list[int]],
    long_reference: list[list[int]],
) -> None:
    server = deployment.running()
    for salt in ("carol", ALICE):  # computed in chunks, and fetched from SSD
        assert ask(server, prompts, salt=salt, concurrency=NUM_PROMPTS) == reference
    # Two at once come to ten blocks: the later one has to give way.
    preempted = server.metric("vllm:num_preemptions_total")
    assert ask(server, prompts[:2], "carol", 2, MANY_OUTPUT_TOKENS) == long_reference[:2]
    assert server.metric("vllm:num_preemptions_total") > preempted
    nothing_is_held(server)


@pytest.mark.spine
def test_flipped_bytes_are_found_and_computed_again(
    deployment: Deployment, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    server = deployment.running()
    stored = tier(server, "num_blocks")
    deployment.stop()
    assert flip_bytes(deployment.folder) >= stored
    server = deployment.start()
    assert ask(server, prompts) == reference
    assert tier(server, "corrupt_total") > 0
    # Each file has at least one wrong byte, so none may be served.
    assert engine(server, "promoted_blocks") == 0
    nothing_is_held(server)


def flip_bytes(folder: Path) -> int:
    """Change a byte in every 4 MiB of every large file: a block is larger than that."""
    num_flipped = 0
    for path in folder.rglob("*"):
        if not path.is_file() or path.stat().st_size < 4 << 20:
            continue
        with path.open("r+b") as file:
            for offset in range(2 << 20, path.stat().st_size, 4 << 20):
                file.seek(offset)
                byte = file.read(1)
                file.seek(offset)
                file.write(bytes([byte[0] ^ 0x55]))
                num_flipped += 1
    return num_flipped


@pytest.mark.parametrize(
    ("kill", "loses_folder"),
    [
        (1, False),
        pytest.param(2, False, marks=pytest.mark.long),
        pytest.param(3, False, marks=pytest.mark.long),
        (4, True),
    ],
)
def test_the_store_is_killed_under_streams(
    deployment: Deployment,
    prompts: list[list[int]],
    reference: list[list[int]],
    kill: int,
    loses_folder: bool,
) -> None:
    server = deployment.running()
    pid = deployment.store_pid()

    async def load_and_kill() -> list[RequestRecord]:
        began = engine(server, "scheduled_requests")
        streams = asyncio.create_task(stream(server, prompts, ALICE, concurrency=3))
        await asyncio.to_thread(
            until, lambda: engine(server, "scheduled_requests") > began + 1, "streams began"
        )
        if loses_folder:
            shutil.rmtree(deployment.folder)
        os.kill(pid, signal.SIGKILL)
        return await streams

    records = asyncio.run(load_and_kill())
    assert [record.error for record in records] == [None] * NUM_PROMPTS
    assert [record.token_ids for record in records] == reference
    until(lambda: server.metric("banaserve_kvstore_up") == 1, "the store is back")
    assert deployment.store_pid() != pid
    nothing_is_held(server)


def test_all_is_well_after_that(
    deployment: Deployment, prompts: list[list[int]], reference: list[list[int]]
) -> None:
    server = deployment.running()
    assert ask(server, prompts[:2], salt="dave") == reference[:2]
    until(lambda: tier(server, "stores_total") > 0, "blocks go to SSD again")
    assert tier(server, "available") == 1
