"""A model that keeps states is prefilled on one host and decoded on another."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import numpy as np
import pytest

import random_models
from benchmarks.network import hosts
from benchmarks.network.hosts import Network
from host_cluster import Cluster
from ports import free_port
from served import OPTIONS
from server_run import Run
from streams import Kind, asked_all
from waiting import eventually

_why = hosts.missing()
pytestmark = [pytest.mark.e2e, pytest.mark.skipif(bool(_why), reason=_why)]

LENGTHS = (5, 100, 128, 256, 300, 400)
OUTPUT_TOKENS = 150
NAME = "hybrid"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return random_models.make("granitemoehybrid", tmp_path_factory.mktemp("model") / "m")


@pytest.fixture(scope="module")
def kinds() -> dict[str, Kind]:
    random = np.random.default_rng(7)
    asked = {
        "model": NAME,
        "temperature": 0.0,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "stream": True,
        "return_token_ids": True,
    }
    prompts = [random.integers(100, 40_000, length).tolist() for length in LENGTHS]
    return {
        str(n): Kind("/v1/completions", {**asked, "prompt": prompt})
        for n, prompt in enumerate(prompts)
    }


@pytest.fixture(scope="module")
def expected(
    tmp_path_factory: pytest.TempPathFactory, model: str, kinds: dict[str, Kind]
) -> list[list[int]]:
    """Of one engine on this machine."""
    words = ("--model", model, "--served-model-name", NAME, "--no-enable-prefix-caching")
    words = (*words, *OPTIONS, "--colocated", "1", "--no-kv-store", "--migration", "off")
    run = Run(tmp_path_factory.mktemp("plain"), free_port(), words, {}, None)
    run.wait_for("Ctrl-C ends it.")
    answers = asyncio.run(asked_all(run, kinds)).values()
    run.close()
    return [answer.tokens[0] for answer in answers]


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, model: str) -> Iterator[Cluster]:
    network, folder = Network(4), tmp_path_factory.mktemp("hosts")
    made = Cluster(network, folder)
    try:
        made.start(
            *("--pd", "1:1", "--model", model, "--served-model-name", NAME),
            *("--skip-prefill-below-tokens", "0"),
        )
        yield made
    finally:
        made.close()
        network.close()
        shutil.rmtree(folder, ignore_errors=True)


def test_states_go_to_the_other_host_with_the_blocks_of_a_prompt(
    cluster: Cluster, kinds: dict[str, Kind], expected: list[list[int]]
) -> None:
    assert cluster.served.asked(kinds) == expected

    def have_come() -> bool:
        """Of each prompt its last block and its states: pushed, or fetched if decode was sooner."""
        at, to = (cluster.store_of(host) for host in cluster.others[:2])
        pushing, receiving = (at, to) if at.pushed_blocks else (to, at)
        come = receiving.received_blocks + pushing.lent_blocks
        return receiving.received_blocks > 0 and come >= pushing.pushed_blocks >= 2 * len(LENGTHS)

    eventually(have_come)
    computed = [
        cluster.served.metric("banaserve_prompt_tokens_computed_total", instance_id=name)
        for name in ("p0", "d0")
    ]
    assert computed == [sum(LENGTHS), 0]
