"""Streams of a model that keeps states (Mamba), under deaths, preemption and lost blocks.

A state cannot be taken back or computed from blocks: whoever goes on with a stream needs the one
behind exactly its tokens, or computes it anew.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

import random_models
from fork_server import ForkServer
from observing import until, writer
from reference import reference_tokens
from server_run import Run
from store_process import fork_store
from streams import Answer, Kind, asked_all, back

pytestmark = pytest.mark.e2e

LENGTHS = (40, 128, 129, 200, 256, 300, 384, 400)
OUTPUT_TOKENS = 300
"""More than two blocks: states are kept at their ends while a stream is decoded."""
NAMES = ("p0", "p1", "d0", "d1")
BLOCK_BYTES = 2 * 65_536
FEW_BLOCKS = 14
"""Fewer than eight streams have at their ends: some are preempted, and start over."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_models.make("granitemoehybrid", tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    random = np.random.default_rng(5)
    return [random.integers(100, 40_000, length).tolist() for length in LENGTHS]


@pytest.fixture(scope="module")
def expected(fork_server: ForkServer, model: str, prompts: list[list[int]]) -> list[list[int]]:
    sampling = {"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    return reference_tokens(fork_server, model, prompts, {"it": sampling}, prefix_caching=False)[
        "it"
    ]


@pytest.fixture(scope="module")
def server(serve: Callable[..., Run], model: str) -> Iterator[Run]:
    run = serve(
        *("--pd", "2:2", "--model", model, "--served-model-name", "m", "--dtype", "float32"),
        *("--max-model-len", "1024", "--skip-prefill-below-tokens", "0"),
        *("--kv-cache-memory-bytes", str(FEW_BLOCKS * BLOCK_BYTES), "--kv-store-size", "256MiB"),
        *("--engine-stall-timeout", "5"),
    )
    yield run
    assert run.end() == 0


def kinds(prompts: list[list[int]]) -> dict[str, Kind]:
    body = {"model": "m", "temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}
    streamed = {"stream": True, "return_token_ids": True}
    return {
        str(n): Kind("/v1/completions", body | streamed | {"prompt": prompt})
        for n, prompt in enumerate(prompts)
    }


def tokens_of(found: dict[str, Answer]) -> list[list[int]]:
    assert [one.error for one in found.values()] == [""] * len(found)
    return [one.tokens[0] for one in found.values()]


def test_streams_that_are_preempted_start_over(
    server: Run, prompts: list[list[int]], expected: list[list[int]]
) -> None:
    for _ in range(3):
        assert tokens_of(asyncio.run(asked_all(server, kinds(prompts)))) == expected
    preempted = sum(
        server.metric("vllm:num_preemptions_total", instance_id=name) for name in ("d0", "d1")
    )
    assert preempted > 0


@pytest.mark.parametrize(
    ("victim", "number", "share"),
    [
        ("p0", signal.SIGKILL, 0.0),
        pytest.param("d0", signal.SIGKILL, 0.1, marks=pytest.mark.spine),
        ("d0", signal.SIGKILL, 0.6),
        ("d1", signal.SIGSTOP, 0.5),
        ("kvstore", signal.SIGKILL, 0.3),
    ],
)
def test_a_death_breaks_no_stream(
    victim: str,
    number: signal.Signals,
    share: float,
    server: Run,
    prompts: list[list[int]],
    expected: list[list[int]],
) -> None:
    """``share``: of all tokens that have come when it dies."""
    pid, seen, due = writer(server.run_dir, victim), dict[int, int](), threading.Event()
    enough = share * OUTPUT_TOKENS * len(prompts)

    def see(answer: Answer) -> None:
        seen[id(answer)] = answer.num_tokens
        if sum(seen.values()) > enough:
            due.set()

    found: dict[str, Answer] = {}
    streams = threading.Thread(
        target=lambda: found.update(asyncio.run(asked_all(server, kinds(prompts), see)))
    )
    streams.start()
    assert due.wait(60)
    os.kill(pid, number)
    streams.join()
    assert tokens_of(found) == expected
    # One that stood still may have had nothing to do: then it is found after the last answer.
    back(server, victim, pid)
    until(lambda: server.is_ready(*NAMES), "all instances are back")
    until(lambda: server.metric("banaserve_kvstore_up") == 1, "the store answers")
    until(lambda: server.metric("banaserve_kvstore_leased_slots") == 0, "no leases")
    until(lambda: server.metric("banaserve_kvstore_writing_slots") == 0, "nothing half written")


def test_a_request_whose_blocks_are_lost_is_computed_from_its_first_token(
    fork_server: ForkServer,
    model: str,
    prompts: list[list[int]],
    expected: list[list[int]],
    tmp_path: Path,
) -> None:
    """vLLM itself ends an engine of several groups of blocks at this."""
    store = fork_store(tmp_path / "kv", 256 << 20)
    rounds = [{"prompts": prompts, "fails": fails} for fails in (False, False, True, False)]
    job = {"model": model, "store": str(tmp_path / "kv"), "rounds": rounds, "max_tokens": 40}
    out, log = tmp_path / "out.json", tmp_path / "log"
    (tmp_path / "job.json").write_text(json.dumps(job))
    script = Path(__file__).with_name("lost_states.py")
    with log.open("wb") as output:
        argv = [str(script), str(tmp_path / "job.json"), str(out)]
        env = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
        code = fork_server.start(argv, env, output.fileno(), output.fileno()).wait()
    store.terminate()
    store.wait()
    assert code == 0, log.read_text(errors="replace")[-3000:]
    found = json.loads(out.read_text())
    assert [one["tokens"] for one in found] == [[tokens[:40] for tokens in expected]] * len(found)
    first, again, lost, last = found
    assert (first["loaded"], first["lost"]) == (0, 0)
    assert again["loaded"] > 0 == again["lost"]
    assert lost["lost"] > 0
    assert last["loaded"] == again["loaded"]
