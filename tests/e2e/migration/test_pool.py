"""What moves away is really freed, and becomes blocks for the layers that stay."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from pathlib import Path
from typing import Any

import pytest

from banaserve import models

pytestmark = pytest.mark.e2e

NUM_BLOCKS = 21
NUM_TOKENS = 60
LAYERS = {"type": "layers", "start": 10, "end": 20}


@pytest.fixture(scope="module")
def rig(one_rig: Any, engine_arguments: Any) -> Iterator[Any]:
    model = models.resolve(models.PACKAGED, None, print).path_or_id
    settings = {"poison": False, "kv_growth": 1.6}
    with one_rig(engine_arguments(model, settings, num_gpu_blocks_override=NUM_BLOCKS)) as rig:
        yield rig


@pytest.fixture(scope="module")
def prompts(rig: Any) -> list[list[int]]:
    """Six streams that need four blocks each: five fit at once."""
    tokenizer = rig.llm.get_tokenizer()
    text = "Once upon a time there was a little animal who lived in a big forest. " * 26
    return [tokenizer(f"Story number {n}. {text}")["input_ids"] for n in range(6)]


@pytest.fixture(scope="module")
def expected(rig: Any, prompts: list[list[int]]) -> Any:
    return rig.run(prompts, NUM_TOKENS)


def resident_bytes() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "VmRSS" in x)
    return int(line.split()[1]) * 1024


def test_freed_layers_become_blocks(rig: Any, prompts: list[list[int]], expected: Any) -> None:
    at_once = rig.requests_at_once
    before_bytes = resident_bytes()
    rig.finish(rig.away(LAYERS, rig.guest()))
    (move,) = rig.do("status")["moves"].values()
    moved = move["facts"]
    assert moved["predicted_bytes"] == 10 * NUM_BLOCKS * rig.do("status")["kv"]["page_bytes"]
    assert moved["freed_bytes"] >= 0.95 * moved["predicted_bytes"]
    # The kernel agrees: the process is smaller, though it has mapped the guest's memory since.
    pages_of_guest = sum_of_shared()
    assert before_bytes - (resident_bytes() - pages_of_guest) >= 0.9 * moved["predicted_bytes"]
    gained = rig.do("status")["kv"]["blocks_gained"]
    assert gained == NUM_BLOCKS * 10 // 20
    assert rig.resize_pool(NUM_BLOCKS + gained).pool.num_blocks == NUM_BLOCKS + gained
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)
    assert rig.requests_at_once > at_once


def sum_of_shared() -> int:
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if "RssShmem" in x)
    return int(line.split()[1]) * 1024


def test_a_block_in_use_is_never_taken_away(
    rig: Any, prompts: list[list[int]], expected: Any, let_pass: Any
) -> None:
    seen = []

    def shrink() -> Generator[None, None, None]:
        yield from let_pass(20)
        seen.append(rig.resize_pool(2))
        yield

    assert rig.agrees(rig.run(prompts, NUM_TOKENS, shrink()), expected)
    assert seen[0].busy > 0
    assert seen[0].pool.num_blocks > NUM_BLOCKS, "nothing was taken"
    assert rig.resize_pool(NUM_BLOCKS).pool == rig.pool()
    assert rig.pool().num_blocks == NUM_BLOCKS
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)


def test_the_way_back_takes_the_memory_again(
    rig: Any, prompts: list[list[int]], expected: Any
) -> None:
    rig.all_home()
    status = rig.do("status", True)["kv"]
    assert status["blocks_gained"] == 0
    assert status["resident_bytes"] >= 30 * NUM_BLOCKS * status["page_bytes"]
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)


def test_a_head_of_one_layer_frees_bytes_but_no_block(rig: Any) -> None:
    rig.finish(rig.away({"type": "heads", "heads": [[5, [1]]]}, rig.guest()))
    moved = list(rig.do("status")["moves"].values())[-1]["facts"]
    kv = rig.do("status")["kv"]
    assert moved["predicted_bytes"] == NUM_BLOCKS * kv["page_bytes"] // 3
    assert moved["freed_bytes"] >= 0.95 * moved["predicted_bytes"]
    assert kv["blocks_gained"] == 0
    rig.all_home()


def test_preempted_requests_give_the_same_tokens_while_layers_are_away(
    rig: Any, prompts: list[list[int]], expected: Any
) -> None:
    rig.finish(rig.away(LAYERS, rig.guest()))
    assert rig.pool().num_blocks == NUM_BLOCKS
    assert rig.agrees(rig.run(prompts, NUM_TOKENS), expected)
    rig.all_home()
