"""What moves away is really freed, and becomes blocks for the layers that stay."""

from __future__ import annotations

from collections.abc import Generator
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.e2e

ENGINE = "llama, pool"
NUM_BLOCKS = 21
NUM_LAYERS, NUM_AWAY = 12, 6
NUM_TOKENS = 60
LAYERS = {"type": "layers", "start": 1, "end": 1 + NUM_AWAY}


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    """Six streams that need four blocks each: five fit at once."""
    return [[(7 * n + 3 * i + i * i) % 2000 + 5 for i in range(400)] for n in range(6)]


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
    assert moved["predicted_bytes"] == NUM_AWAY * NUM_BLOCKS * rig.do("status")["kv"]["page_bytes"]
    assert moved["freed_bytes"] >= 0.95 * moved["predicted_bytes"]
    # The kernel agrees: the process is smaller, though it has mapped the guest's memory since.
    pages_of_guest = sum_of_shared()
    assert before_bytes - (resident_bytes() - pages_of_guest) >= 0.9 * moved["predicted_bytes"]
    gained = rig.do("status")["kv"]["blocks_gained"]
    assert gained == NUM_BLOCKS * NUM_AWAY // (NUM_LAYERS - NUM_AWAY)
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
    assert status["resident_bytes"] >= NUM_LAYERS * NUM_BLOCKS * status["page_bytes"]
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
