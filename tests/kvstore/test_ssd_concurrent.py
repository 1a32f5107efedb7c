"""Many loads and stores at a time, while room is made and blocks are evicted and cleared."""

from __future__ import annotations

import random
import select
from pathlib import Path

import numpy as np
import pytest

from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.tiers.interface import BlockBytes, BlockName, Completion, TierOutcome
from banaserve.kvstore.tiers.ssd import scan
from banaserve.kvstore.tiers.ssd.files import aligned_bytes
from banaserve.kvstore.tiers.ssd.folder import BlockFile
from banaserve.kvstore.tiers.ssd.record import RecordHeader
from banaserve.kvstore.tiers.ssd.scan import check_folder
from banaserve.kvstore.tiers.ssd.tier import SsdTier
from depth import seeds

CAPACITY_BYTES = 2**20
QUEUE_DEPTH = 6
NUM_KEYS = 120
NUM_TRANSFERS = 300
KEYS = [number.to_bytes(32, "big") for number in range(NUM_KEYS)]
DEADLINE_S = 60.0


def content(number: int) -> BlockBytes:
    block = aligned_bytes(1 + number * 1237 % 40_000)
    block[:] = np.frombuffer(random.Random(number).randbytes(block.nbytes), np.uint8)
    return block


CONTENTS = [content(number) for number in range(NUM_KEYS)]


class Traffic:
    """What is under way, and what must come of it."""

    def __init__(self, tier: SsdTier, seed: int) -> None:
        self.tier = tier
        self.chance = random.Random(seed)
        self.stores: dict[int, int] = {}
        self.loads: dict[int, tuple[int, BlockBytes]] = {}
        self.num_done = 0
        # Blocks in use outlive clear, but not the next restart.
        self.outlived_clear = False

    def busy(self, number: int) -> bool:
        loading = [loaded for loaded, _ in self.loads.values()]
        return number in self.stores.values() or number in loading

    def step(self) -> None:
        number = self.chance.randrange(NUM_KEYS)
        match self.chance.choices(["store", "load", "clear", "poll"], [40, 40, 0.1, 20]):
            case ["store"]:
                self.store(number)
            case ["load"]:
                self.load(number)
            case ["clear"]:
                self.tier.clear()
                left = [n for n, s in enumerate(self.tier.lookup(KEYS)) if s is not Lookup.MISS]
                assert all(map(self.busy, left))
                self.outlived_clear |= bool(left)
            case _:
                self.wait()
        self.tier.check()
        assert self.tier.stats().used_bytes <= CAPACITY_BYTES

    def store(self, number: int) -> None:
        parent = KEYS[number - 1] if number % 8 else None
        ticket = self.tier.submit_store(BlockName(KEYS[number], parent), CONTENTS[number])
        if ticket is not None:
            self.stores[ticket] = number

    def load(self, number: int) -> None:
        (state,) = self.tier.lookup([KEYS[number]])
        target = aligned_bytes(CONTENTS[number].nbytes)
        ticket = self.tier.submit_load(KEYS[number], target)
        # Whatever else goes on: a block that is there is loaded, up to the queue's depth.
        has_place = len(self.stores) + len(self.loads) < QUEUE_DEPTH
        assert (ticket is not None) == (state is Lookup.HIT and has_place)
        if ticket is not None:
            self.loads[ticket] = number, target

    def end(self, completions: list[Completion]) -> None:
        for completion in completions:
            assert completion.outcome is TierOutcome.DONE
            self.num_done += 1
            if completion.ticket in self.stores:
                del self.stores[completion.ticket]
                continue
            number, target = self.loads.pop(completion.ticket)
            assert (target == CONTENTS[number]).all(), "wrong data"

    def wait(self) -> None:
        if not self.tier.is_idle:
            assert select.select([self.tier.fd], [], [], DEADLINE_S)[0], "the tier is silent"
        self.end(self.tier.poll())

    def finish(self) -> None:
        while not self.tier.is_idle or select.select([self.tier.fd], [], [], 0)[0]:
            self.wait()
        assert not self.stores
        assert not self.loads


@pytest.mark.parametrize("seed", seeds(8, 8))
def test_many_at_a_time(seed: int, tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, CAPACITY_BYTES, queue_depth=QUEUE_DEPTH)
    traffic = Traffic(tier, seed)
    while traffic.num_done < NUM_TRANSFERS:
        traffic.step()
    traffic.finish()
    stats = tier.stats()
    assert traffic.num_done == stats.loads + stats.stores
    assert stats.evictions > 0
    assert (stats.corrupt, stats.failures) == (0, 0)
    present = set(tier.lookup(KEYS))
    assert present <= {Lookup.HIT, Lookup.MISS}
    tier.check()
    tier.close()
    report = check_folder(tmp_path)
    assert report.is_clean, report.problems
    assert report.num_ok >= stats.num_blocks or traffic.outlived_clear


def test_a_check_reads_blocks_that_a_store_deletes_meanwhile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = SsdTier(tmp_path, CAPACITY_BYTES, queue_depth=QUEUE_DEPTH)
    traffic = Traffic(tier, 0)
    for number in (1, 2):
        traffic.store(number)
    traffic.finish()
    tier.close()
    read_header = scan._read_header

    def then_deleted(fd: int, file: BlockFile) -> RecordHeader | None:
        Path(file.path).unlink()
        return read_header(fd, file)

    monkeypatch.setattr(scan, "_read_header", then_deleted)
    report = check_folder(tmp_path)
    assert (report.num_files, report.num_ok) == (2, 2)
    assert not list(tmp_path.rglob("*.block"))
