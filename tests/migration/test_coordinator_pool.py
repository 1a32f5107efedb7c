"""Shrinking vLLM's own block pool while blocks are in use, and guests seen from outside."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("vllm")

from vllm.v1.core.block_pool import BlockPool

from banaserve.engine.compat import scheduler as compat
from banaserve.serving.moves import process_stats
from banaserve.serving.moves.process_stats import ProcessUsage

NUM_BLOCKS = 10


@pytest.fixture
def scheduler() -> Any:
    pool = BlockPool(NUM_BLOCKS, enable_caching=True, hash_block_size=16)
    return SimpleNamespace(
        kv_cache_manager=SimpleNamespace(block_pool=pool),
        cache_config=SimpleNamespace(num_gpu_blocks=NUM_BLOCKS),
        kv_cache_config=SimpleNamespace(num_blocks=NUM_BLOCKS),
    )


@pytest.fixture
def pool(scheduler: Any) -> BlockPool:
    return scheduler.kv_cache_manager.block_pool


def test_held_blocks_are_given_to_nobody_and_drain(scheduler: Any, pool: BlockPool) -> None:
    in_use = pool.get_new_blocks(7)  # 1 to 7; 0 is nobody's
    assert compat.shrink_pool(scheduler, 6) == [6, 7]
    compat.hold_blocks(scheduler, 6)
    assert pool.get_num_free_blocks() == 0
    pool.free_blocks([in_use[5]])
    assert pool.get_num_free_blocks() == 0, "a held block came back into circulation"
    pool.free_blocks([in_use[0]])
    assert [block.block_id for block in pool.get_new_blocks(1)] == [1]
    compat.release_blocks(scheduler)
    assert compat.shrink_pool(scheduler, 6) == [7]
    compat.hold_blocks(scheduler, 6)
    pool.free_blocks([in_use[6]])
    compat.release_blocks(scheduler)
    assert compat.shrink_pool(scheduler, 6) == []
    assert compat.pool_usage(scheduler) == (6, 0)
    assert scheduler.cache_config.num_gpu_blocks == 6
    pool.free_blocks([*in_use[:5]])
    assert compat.pool_usage(scheduler) == (6, 5)


def test_a_hold_that_is_given_up_leaves_the_pool_as_it_was(scheduler: Any, pool: BlockPool) -> None:
    in_use = pool.get_new_blocks(4)
    for first in (3, 5, 2):
        compat.hold_blocks(scheduler, first)
    compat.release_blocks(scheduler)
    compat.release_blocks(scheduler)
    assert compat.pool_usage(scheduler) == (NUM_BLOCKS, 5)
    pool.free_blocks(in_use)
    assert compat.pool_usage(scheduler) == (NUM_BLOCKS, 9)
    assert sorted(block.block_id for block in pool.get_new_blocks(9)) == list(range(1, 10))


# ---- guests' processes


@pytest.fixture
def process() -> Iterator[subprocess.Popen[bytes]]:
    code = "kept = bytearray(b'x') * (64 << 20); print(len(kept), flush=True)\nwhile True: pass"
    made = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE)
    assert made.stdout is not None
    made.stdout.readline()
    yield made
    made.kill()
    made.wait()


def test_memory_and_time_of_a_process_are_seen_from_outside(
    process: subprocess.Popen[bytes],
) -> None:
    first = process_stats.look(process.pid, ProcessUsage())
    assert first is not None
    assert first.num_bytes > 64 << 20
    assert first.busy_fraction == 0.0
    second = first
    while second.cpu_s == first.cpu_s:
        found = process_stats.look(process.pid, first)
        assert found is not None
        second = found
    assert 0.0 < second.busy_fraction <= 1.0


def test_a_stopped_process_is_seen_and_an_ended_one_is_none(
    process: subprocess.Popen[bytes],
) -> None:
    assert not process_stats.is_stopped(process.pid)
    os.kill(process.pid, signal.SIGSTOP)
    os.waitpid(process.pid, os.WUNTRACED)
    assert process_stats.is_stopped(process.pid)
    process.kill()
    process.wait()
    assert not process_stats.is_stopped(process.pid)
    assert process_stats.look(process.pid, ProcessUsage()) is None
