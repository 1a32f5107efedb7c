"""The SSD tier against a plain model: evictions, restarts, crashes, damage."""

from __future__ import annotations

import os
import random
import select
import shutil
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.tiers.interface import BlockBytes, BlockName, TierOutcome
from banaserve.kvstore.tiers.ssd.files import aligned_bytes
from banaserve.kvstore.tiers.ssd.scan import check_folder
from banaserve.kvstore.tiers.ssd.tier import SsdTier
from depth import num_examples

CAPACITY_BYTES = 384 * 1024
NUM_KEYS = 24
KEYS = [number.to_bytes(32, "big") for number in range(NUM_KEYS)]
SIZES = [1, 4096, 5000, 12288, 20000, 30000]
DEADLINE_S = 60.0
# Files in memory: what is tested here does not depend on a disk, whose flushes take long.
MEMORY = "/dev/shm" if os.access("/dev/shm", os.W_OK) else None

numbers = st.integers(0, NUM_KEYS - 1)
places = st.integers(0, 2**20)


def content(number: int) -> BlockBytes:
    """A key always means the same bytes."""
    num_bytes = SIZES[number % len(SIZES)]
    block = aligned_bytes(num_bytes)
    block[:] = np.frombuffer(random.Random(number).randbytes(num_bytes), np.uint8)
    return block


CONTENTS = [content(number) for number in range(NUM_KEYS)]


@dataclass
class Block:
    parent: int | None
    age: int
    last_used: int


def _copy_if_there(source: str, target: str) -> None:
    """Copy a file; the tier's threads may remove it meanwhile, as they may before a crash."""
    with suppress(FileNotFoundError):
        shutil.copy2(source, target)


class SsdMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.root = Path(tempfile.mkdtemp(prefix="banaserve-ssd-", dir=MEMORY))
        self.folder = self.root / "0"
        self.tier = self.open()
        self.blocks: dict[int, Block] = {}
        # Stored since the last clear: what may be found again, though it was evicted.
        self.stored: set[int] = set()
        self.tick = 0
        # Damage may bring older records of a key back, with another place in the order.
        self.damaged = False
        self.num_evictions = 0

    def open(self) -> SsdTier:
        return SsdTier(self.folder, CAPACITY_BYTES, queue_depth=2)

    def teardown(self) -> None:
        self.tier.close()
        if not self.damaged:
            assert check_folder(self.folder).is_clean
        shutil.rmtree(self.root)

    @rule(number=numbers, parent=st.none() | numbers)
    def store(self, number: int, parent: int | None) -> None:
        name = BlockName(KEYS[number], None if parent is None else KEYS[parent])
        while (ticket := self.tier.submit_store(name, CONTENTS[number])) is None:
            if number in self.present():
                assert number in self.blocks
                return
            self.wait()
        # Room was made before it was there.
        self.follow_evictions({number})
        if parent is not None and self.is_ancestor(number, parent):
            parent = None
        self.tick += 1
        self.blocks[number] = Block(parent, self.tick, self.tick)
        self.stored.add(number)
        assert self.end_of(ticket) is TierOutcome.DONE
        self.settle()

    # Most random sequences would never come near the budget.
    @rule(first=numbers, count=st.integers(2, 12))
    def store_chain(self, first: int, count: int) -> None:
        last = None
        for number in range(first, min(first + count, NUM_KEYS)):
            self.store(number, last)
            last = number

    @rule(number=numbers)
    def load(self, number: int) -> None:
        target = aligned_bytes(CONTENTS[number].nbytes)
        ticket = self.tier.submit_load(KEYS[number], target)
        assert (ticket is None) == (number not in self.blocks)
        if ticket is None:
            return
        outcome = self.end_of(ticket)
        if outcome is TierOutcome.DONE:
            assert (target == CONTENTS[number]).all(), "wrong data"
            self.tick += 1
            self.blocks[number].last_used = self.tick
        else:
            assert outcome is TierOutcome.CORRUPT
            assert self.damaged
            del self.blocks[number]
        self.settle()

    @rule(crash=st.booleans())
    def clear(self, crash: bool) -> None:
        assert self.tier.clear() == len(self.blocks)
        self.blocks.clear()
        self.stored.clear()
        if crash:
            self.crash()
        else:
            self.reopen()
        self.damaged = False
        assert not self.present()

    @rule()
    def reopen(self) -> None:
        self.tier.close()
        self.tier = self.open()
        self.follow_restart()

    @rule()
    def crash(self) -> None:
        """What a killed process leaves: its files as they are at this moment."""
        self.leave_behind()
        self.tier = self.open()
        self.follow_restart()

    @rule(which=places, cut=places)
    def crash_with_a_torn_file(self, which: int, cut: int) -> None:
        self.leave_behind()
        if files := self.files():
            file = files[which % len(files)]
            os.truncate(file, cut % (file.stat().st_size + 1))
            self.damaged = True
        self.tier = self.open()
        self.follow_restart()

    @rule(which=places, place=places, bit=st.integers(0, 7), restart=st.booleans())
    def flip_a_bit(self, which: int, place: int, bit: int, restart: bool) -> None:
        if restart:
            self.leave_behind()
        if files := self.files():
            with files[which % len(files)].open("r+b") as file:
                place %= file.seek(0, 2)
                file.seek(place)
                byte = file.read(1)[0]
                file.seek(place)
                file.write(bytes([byte ^ 1 << bit]))
            self.damaged = True
        if restart:
            self.tier = self.open()
            self.follow_restart()

    @invariant()
    def agrees(self) -> None:
        self.tier.check()
        assert self.tier.is_idle
        stats = self.tier.stats()
        assert stats.used_bytes <= CAPACITY_BYTES
        assert stats.used_bytes == sum(path.stat().st_size for path in self.files())
        assert stats.num_blocks == len(self.blocks)
        assert self.present() == set(self.blocks)
        assert not stats.problem

    def files(self) -> list[Path]:
        return sorted(self.folder.glob("blocks/*/*"), key=lambda path: path.name)

    def present(self) -> set[int]:
        states = self.tier.lookup(KEYS)
        assert Lookup.PENDING not in states or not self.tier.is_idle
        return {number for number in range(NUM_KEYS) if states[number] is Lookup.HIT}

    def wait(self) -> list[tuple[int, TierOutcome]]:
        assert select.select([self.tier.fd], [], [], DEADLINE_S)[0], "the tier is silent"
        return [(completion.ticket, completion.outcome) for completion in self.tier.poll()]

    def end_of(self, ticket: int) -> TierOutcome:
        ended: list[tuple[int, TierOutcome]] = []
        while not ended:
            ended = self.wait()
        ((ended_ticket, outcome),) = ended
        assert ended_ticket == ticket
        return outcome

    def settle(self) -> None:
        while not self.tier.is_idle or select.select([self.tier.fd], [], [], 0)[0]:
            assert not self.wait()
        self.follow_evictions(set())

    def follow_evictions(self, being_written: set[int]) -> None:
        """The plain model's idea of who went must be the tier's."""
        present = self.present() - being_written
        num_evictions = self.tier.stats().evictions
        if self.damaged:
            # A copy may have met damage, too.
            self.blocks = {n: block for n, block in self.blocks.items() if n in present}
        while self.num_evictions < num_evictions and not self.damaged:
            parents = {block.parent for block in self.blocks.values()}
            leaves = [n for n in self.blocks if n not in parents]
            del self.blocks[min(leaves, key=lambda n: self.blocks[n].last_used)]
            self.num_evictions += 1
        self.num_evictions = num_evictions

    def leave_behind(self) -> None:
        crashed = self.root / str(int(self.folder.name) + 1)
        shutil.copytree(self.folder, crashed, copy_function=_copy_if_there)
        self.tier.close()
        shutil.rmtree(self.folder)
        self.folder = crashed

    def follow_restart(self) -> None:
        self.settle_after_restart()
        present = self.present()
        assert present <= self.stored, "a block that was cleared came back"
        if not self.damaged and not self.tier.stats().evictions:
            assert present >= set(self.blocks), "a block was lost"
        # What was evicted and is there again has lost its place in the order.
        self.damaged |= not present <= set(self.blocks)
        by_age = sorted(present & set(self.blocks), key=lambda n: self.blocks[n].age)
        for number in by_age:
            self.tick += 1
            self.blocks[number].last_used = self.tick
        self.blocks = {
            number: self.blocks.get(number, Block(None, 0, 0)) for number in sorted(present)
        }
        self.num_evictions = self.tier.stats().evictions

    def settle_after_restart(self) -> None:
        while not self.tier.is_idle or select.select([self.tier.fd], [], [], 0)[0]:
            self.wait()

    def is_ancestor(self, number: int, of: int | None) -> bool:
        while of is not None and of != number:
            of = self.blocks[of].parent if of in self.blocks else None
        return of is not None


SsdMachine.TestCase.settings = settings(
    max_examples=num_examples(100), stateful_step_count=30, deadline=None, derandomize=True
)
TestSsdTier = pytest.mark.deep(SsdMachine.TestCase)
