"""A process that is killed while it writes leaves a folder in good order."""

from __future__ import annotations

import itertools
import os
import random
import select
import signal
from pathlib import Path
from typing import NoReturn

import numpy as np
import pytest

from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.tiers.interface import BlockBytes, BlockName, Completion, TierOutcome
from banaserve.kvstore.tiers.ssd.files import aligned_bytes
from banaserve.kvstore.tiers.ssd.scan import check_folder
from banaserve.kvstore.tiers.ssd.tier import SsdTier
from depth import num_examples

NUM_KILLS = num_examples(52)
BLOCK_BYTES = 12_000
DEADLINE_S = 60.0
MIB = 2**20


def key(number: int) -> bytes:
    return number.to_bytes(32, "big")


def content(number: int) -> BlockBytes:
    block = aligned_bytes(BLOCK_BYTES)
    block[:] = np.frombuffer(random.Random(number).randbytes(BLOCK_BYTES), np.uint8)
    return block


def poll(tier: SsdTier) -> list[Completion]:
    assert select.select([tier.fd], [], [], DEADLINE_S)[0], "the tier is silent"
    return tier.poll()


def write_for_ever(folder: Path, capacity_bytes: int, first: int, out: int) -> None:
    """Store blocks, several at a time, and say which ones are stored."""
    tier = SsdTier(folder, capacity_bytes)
    tickets: dict[int, int] = {}
    for number in itertools.count(first):
        name = BlockName(key(number), key(number - 1) if number % 10 else None)
        block = content(number)
        while (ticket := tier.submit_store(name, block)) is None:
            if tier.lookup([name.key]) != [Lookup.MISS]:
                break
            for completion in poll(tier):
                assert completion.outcome is TierOutcome.DONE
                stored = tickets.pop(completion.ticket)
                os.write(out, b"%d %d\n" % (stored, tier.stats().evictions))
        if ticket is not None:
            tickets[ticket] = number


def run_child(folder: Path, capacity_bytes: int, first: int, out: int) -> NoReturn:
    try:
        write_for_ever(folder, capacity_bytes, first, out)
    finally:
        os._exit(1)


def stored_before_kill(folder: Path, capacity_bytes: int, first: int, count: int):
    """Fork a writer and kill it after it has stored ``count`` blocks; what it said."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        run_child(folder, capacity_bytes, first, writer)
    os.close(writer)
    with os.fdopen(reader, "rb", buffering=0) as lines:
        said = b""
        while said.count(b"\n") < count:
            data = lines.read(64)
            assert data, "the writer has died on its own"
            said += data
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        said += lines.read()
    complete = said[: said.rfind(b"\n")].split(b"\n")
    return [tuple(map(int, line.split())) for line in complete]


def load(tier: SsdTier, number: int) -> BlockBytes | None:
    target = aligned_bytes(BLOCK_BYTES)
    if tier.submit_load(key(number), target) is None:
        return None
    ended: list[Completion] = []
    while not ended:
        ended = poll(tier)
    assert ended[0].outcome is TierOutcome.DONE
    return target


@pytest.mark.parametrize("capacity_bytes", [64 * MIB, MIB], ids=["roomy", "tight"])
def test_kill_while_writing(capacity_bytes: int, tmp_path: Path) -> None:
    chance = random.Random(capacity_bytes)
    next_number = 0
    stored: set[int] = set()
    for _ in range(NUM_KILLS // 2):
        count = chance.randint(1, 40)
        said = stored_before_kill(tmp_path, capacity_bytes, next_number, count)
        report = check_folder(tmp_path)
        assert report.num_corrupt == 0, report.problems
        assert not report.in_use
        tier = SsdTier(tmp_path, capacity_bytes)
        stored |= {number for number, _ in said}
        next_number = max(stored) + 1
        found = {n for n in range(next_number + 300) if tier.lookup([key(n)]) == [Lookup.HIT]}
        evicted = any(num_evictions for _, num_evictions in said) or tier.stats().evictions
        if not evicted and capacity_bytes > MIB:
            assert found >= stored, "a block that was stored is lost"
        for number in found:
            block = load(tier, number)
            assert block is None or (block == content(number)).all(), "wrong data"
        next_number = max(next_number, max(found, default=0) + 1)
        tier.check()
        tier.close()
        report = check_folder(tmp_path)
        assert report.is_clean, report.problems
        assert report.num_ok
