"""Paced engines: time is modelled, everything else is real, and tokens are those of one engine."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from banaserve.base.config.serve_config import MINIATURE
from banaserve.base.platform.run_dir import find_admin
from banaserve.contracts.migration_api import MoveLayers, Return
from banaserve.frontdoor.admin_client import AdminClient
from banaserve.orchestrator.control.costs.profile import load
from banaserve.pacing import miniatures
from banaserve.pacing.step_log import readers
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.loops import closed_loop
from banaserve_bench.loadgen.modelled_time import modelled_time
from depth import chosen_seed
from fork_server import ForkServer
from reference import reference_tokens
from server_run import Run

pytestmark = pytest.mark.e2e

PROFILE = load("opt-13b-a100")
INSTANCES = ["d0", "d1", "p0", "p1"]
OUTPUT_TOKENS = 24
SAMPLING = {"temperature": 0.0, "max_tokens": OUTPUT_TOKENS, "ignore_eos": True}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    draws = random.Random(chosen_seed(5))
    return [draws.choices(range(500, 40_000), k=n) for n in (3, 40, 64, 100, 257, 400, 700, 90)]


@pytest.fixture(scope="module")
def server(serve: Callable[..., Run]) -> Iterator[Run]:
    options = ("--model", MINIATURE, "--pace", PROFILE.name, "--dilate", "1.5", "--pd", "2:2")
    run = serve(*options, "--kv-store-size", "128MiB")
    yield run
    assert run.end() == 0


@pytest.fixture(scope="module")
def run_dir(server: Run) -> Path:
    return server.run_dir


@pytest.fixture(scope="module")
def reference(fork_server: ForkServer, prompts: list[list[int]]) -> list[list[int]]:
    """One vLLM engine with the same miniature, in real time."""
    model = miniatures.resolve(PROFILE, print)
    return reference_tokens(fork_server, model.path_or_id, prompts, {"greedy": SAMPLING})["greedy"]


def ask(server: Run, prompts: list[list[int]]) -> list[list[int]]:
    calls = [
        CompletionCall(str(i), prompt=tokens, max_tokens=OUTPUT_TOKENS, extra={"ignore_eos": True})
        for i, tokens in enumerate(prompts)
    ]

    async def run() -> list[list[int]]:
        name = f"paced-{PROFILE.name}"
        async with OpenAiClient(server.url, name, return_token_ids=True) as client:
            records = await closed_loop(client, calls, concurrency=4)
        assert [record.error for record in records] == [None] * len(records)
        return [record.token_ids for record in records]

    return asyncio.run(run())


def test_it_says_that_time_is_modelled(server: Run) -> None:
    told = modelled_time(server.url)
    assert told is not None
    assert (told.profile, told.source, told.dilation) == (PROFILE.name, PROFILE.source, 1.5)
    banner = server.log_path.read_text()
    assert f"MODELLED, not measured: {PROFILE.name}" in banner
    assert "takes 1.5 s" in banner


def test_tokens_equal_one_engine_in_real_time(
    server: Run, prompts: list[list[int]], reference: list[list[int]], run_dir: Path
) -> None:
    assert len({tuple(tokens) for tokens in reference}) == len(prompts)
    assert ask(server, prompts) == reference
    logs = {log.instance_id: log for log in readers(run_dir)}
    assert sorted(logs) == INSTANCES
    fixed_s = 1.5 * min(PROFILE.prefill.fixed_s, PROFILE.decode_small.fixed_s)
    for log in logs.values():
        steps = log.steps()
        assert steps, f"{log.instance_id} took no step"
        assert all(step.modelled_s >= fixed_s for step in steps)
        # Late it may be on a busy machine; early it is never.
        assert all(step.took_s >= step.modelled_s - 1e-6 for step in steps)
        sums = log.sums()
        assert server.metric("banaserve_paced_steps_total", instance_id=log.instance_id) >= len(
            steps
        )
        overrun = server.metric("banaserve_paced_steps_overrun_total", instance_id=log.instance_id)
        assert 0 <= overrun <= sums.num_steps


def test_tokens_stay_the_same_while_layers_are_away_and_their_device_is_charged(
    server: Run, prompts: list[list[int]], reference: list[list[int]], run_dir: Path
) -> None:
    admin = AdminClient(*find_admin(run_dir))
    answers: list[list[list[int]]] = []
    asking = threading.Thread(target=lambda: answers.append(ask(server, prompts)))
    asking.start()
    moved = admin.run(MoveLayers("d0", "p0", (2, 5)))
    assert moved.state == "done", moved.error
    asking.join()
    answers.append(ask(server, prompts))
    assert answers == [reference, reference]
    (host,) = [log for log in readers(run_dir) if log.instance_id == "d0"]
    assert host.taken("p0") > 0
    assert host.taken("p1") == 0
    assert admin.run(Return("d0")).state == "done"
    assert ask(server, prompts[:2]) == reference[:2]
