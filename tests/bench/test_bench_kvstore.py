"""The parts of the store's benchmark: that they move the bytes that they time."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from benchmarks.kvstore.disk import DiskBench
from benchmarks.kvstore.memory import (
    ARRANGEMENTS,
    NUM_LAYERS,
    PoolBench,
    store_daemon,
)

BLOCK_BYTES = NUM_LAYERS * 4096


@pytest.fixture
def pool() -> Iterator[PoolBench]:
    with store_daemon("4MiB") as path:
        bench = PoolBench(path, BLOCK_BYTES, 4, seed=1, ring_bytes=8 * BLOCK_BYTES)
        yield bench
        bench.close()


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_pool_requests_are_timed_and_checked(pool: PoolBench, arrangement: str) -> None:
    # More than the pool holds, so that blocks are evicted.
    for _ in range(12):
        assert min(pool.run(arrangement)) > 0


@pytest.mark.parametrize("arrangement", ARRANGEMENTS)
def test_other_bytes_from_the_pool_are_noticed(
    pool: PoolBench, arrangement: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    pool.run(arrangement)
    put = pool.put

    def put_and_spoil(keys: list[bytes], how: str) -> None:
        put(keys, how)
        pool.client.view().memory[:] ^= 1

    monkeypatch.setattr(pool, "put", put_and_spoil)
    with pytest.raises(UserError, match="other bytes"):
        pool.run(arrangement)


def test_a_request_waits_twice_for_the_daemon(pool: PoolBench) -> None:
    assert pool.round_trips() == 2
    assert pool.lookups_per_s(3) > 0


def test_blocks_go_to_disk_and_back_in_both_ways(tmp_path: Path) -> None:
    bench = DiskBench(tmp_path, BLOCK_BYTES, num_blocks=6, depth=2, seed=1)
    for tier_first in (False, True):
        assert min(bench.run(tier_first)) > 0
    bench.close()
    assert not (tmp_path / "raw").exists()
