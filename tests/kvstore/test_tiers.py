"""What every tier has to do, over all of them. A tier is one line of ``TIERS``."""

from __future__ import annotations

import random
import select
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest
from dictionary_tier import DictionaryTier

from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.tiers.interface import (
    BlockBytes,
    BlockName,
    Completion,
    StoreTier,
    TierOutcome,
)
from banaserve.kvstore.tiers.ssd.files import aligned_bytes
from banaserve.kvstore.tiers.ssd.tier import SsdTier
from banaserve_mooncake import supervisor as mooncake_supervisor
from mooncake_master import joined_mooncake, missing_mooncake, mooncake_master

pytestmark = pytest.mark.deep

_masters = ExitStack()


@pytest.fixture(autouse=True)
def _no_goodbyes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Masters end right after their clients, who need not take leave of them for two seconds."""
    monkeypatch.setattr(mooncake_supervisor, "_LEAVE_TIMEOUT_S", 0.1)


def mooncake(folder: Path, capacity_bytes: int) -> StoreTier:
    """At a master of its own, so that nobody else's blocks are there."""
    if (missing := missing_mooncake()) is not None:
        pytest.skip(missing)
    options = "segment=64MiB&block=4MiB&timeout=30"
    return joined_mooncake(_masters.enter_context(mooncake_master()), options)


# By name: a tier with an empty folder for its files and about this many bytes for blocks.
TIERS: dict[str, Callable[[Path, int], StoreTier]] = {
    "dictionary": lambda folder, capacity_bytes: DictionaryTier(capacity_bytes),
    "ssd": SsdTier,
    "mooncake": mooncake,
}

CAPACITY_BYTES = 4 * 2**20
BLOCK_BYTES = 40_960
DEADLINE_S = 60.0


def open_tier(kind: str, folder: Path) -> StoreTier:
    return TIERS[kind](folder, CAPACITY_BYTES)


@pytest.fixture(autouse=True)
def masters() -> Iterator[None]:
    """Ends the masters that a test has started, after its tiers."""
    yield
    _masters.close()


@pytest.fixture(params=TIERS, ids=lambda name: name.replace(" ", "-"))
def tier(request: pytest.FixtureRequest, tmp_path: Path, masters: None) -> Iterator[StoreTier]:
    tier = open_tier(request.param, tmp_path)
    yield tier
    tier.check()
    tier.close()


def name(number: int, parent: int | None = None, namespace: int = 0) -> BlockName:
    parent_key = None if parent is None else name(parent, None, namespace).key
    return BlockName(namespace.to_bytes(16, "big") + number.to_bytes(16, "big"), parent_key)


def content(number: int, num_bytes: int = BLOCK_BYTES) -> BlockBytes:
    block = aligned_bytes(num_bytes)
    block[:] = np.frombuffer(random.Random(number).randbytes(num_bytes), np.uint8)
    return block


def wait(tier: StoreTier, *tickets: int) -> dict[int, Completion]:
    """Poll until all tickets have ended; the completions by ticket."""
    ended: dict[int, Completion] = {}
    while not ended.keys() >= set(tickets):
        assert select.select([tier.fd], [], [], DEADLINE_S)[0], "the tier is silent"
        for completion in tier.poll():
            assert completion.ticket not in ended, "a ticket ended twice"
            ended[completion.ticket] = completion
        tier.check()
    return ended


def submit(tier: StoreTier, block: BlockName, source: BlockBytes) -> int:
    """Offer a block until the tier takes it: it may have to make room first."""
    while (ticket := tier.submit_store(block, source)) is None:
        assert tier.lookup([block.key]) == [Lookup.MISS]
        assert select.select([tier.fd], [], [], DEADLINE_S)[0], "the tier takes nothing"
        assert not tier.poll()
    return ticket


def store(tier: StoreTier, block: BlockName, source: BlockBytes) -> None:
    ticket = submit(tier, block, source)
    assert wait(tier, ticket)[ticket].outcome is TierOutcome.DONE


def load(tier: StoreTier, key: bytes, num_bytes: int = BLOCK_BYTES) -> BlockBytes:
    target = aligned_bytes(num_bytes)
    ticket = tier.submit_load(key, target)
    assert ticket is not None
    assert wait(tier, ticket)[ticket].outcome is TierOutcome.DONE
    return target


def look(tier: StoreTier, key: bytes) -> Lookup:
    """What the tier knows of a key once no peer is being asked any more."""
    while (state := tier.lookup([key])[0]) is Lookup.PENDING:
        assert select.select([tier.fd], [], [], DEADLINE_S)[0], "the peers do not answer"
        assert not tier.poll()
    return state


def hits(tier: StoreTier, *numbers: int) -> list[int]:
    states = tier.lookup([name(number).key for number in numbers])
    return [number for number, state in zip(numbers, states, strict=True) if state is Lookup.HIT]


@pytest.mark.parametrize("num_bytes", [1, 100, 4095, 4096, 4097, 8192, 100_000, 131_072])
def test_what_was_stored_is_loaded(tier: StoreTier, num_bytes: int) -> None:
    key = name(1).key
    assert look(tier, key) is Lookup.MISS
    store(tier, name(1), content(1, num_bytes))
    assert tier.lookup([key]) == [Lookup.HIT]
    assert bytes(load(tier, key, num_bytes)) == bytes(content(1, num_bytes))
    assert bytes(load(tier, key, num_bytes)) == bytes(content(1, num_bytes))


@pytest.mark.parametrize("num_key_bytes", [32, 33, 48, 80])
def test_keys_of_every_length(tier: StoreTier, num_key_bytes: int) -> None:
    keys = [bytes([i]) * num_key_bytes for i in (1, 2)]
    store(tier, BlockName(keys[0], None), content(1))
    store(tier, BlockName(keys[1], keys[0]), content(2))
    assert bytes(load(tier, keys[1])) == bytes(content(2))
    assert bytes(load(tier, keys[0])) == bytes(content(1))


def test_blocks_of_different_sizes_lie_side_by_side(tier: StoreTier) -> None:
    sizes = {i: 1000 * i for i in range(1, 20)}
    for number, num_bytes in sizes.items():
        store(tier, name(number), content(number, num_bytes))
    for number, num_bytes in sizes.items():
        assert bytes(load(tier, name(number).key, num_bytes)) == bytes(content(number, num_bytes))


def test_namespaces_are_apart(tier: StoreTier) -> None:
    store(tier, name(1, namespace=1), content(1))
    assert look(tier, name(1, namespace=2).key) is Lookup.MISS
    store(tier, name(1, namespace=2), content(2))
    assert bytes(load(tier, name(1, namespace=1).key)) == bytes(content(1))
    assert bytes(load(tier, name(1, namespace=2).key)) == bytes(content(2))


def test_a_block_that_is_there_is_not_stored_again(tier: StoreTier) -> None:
    store(tier, name(1), content(1))
    assert tier.submit_store(name(1), content(2)) is None
    assert tier.lookup([name(1).key]) == [Lookup.HIT]
    assert bytes(load(tier, name(1).key)) == bytes(content(1))
    assert tier.stats().stores == 1


def test_a_block_that_is_being_stored_is_not_stored_or_loaded(tier: StoreTier) -> None:
    for number in range(1, 51):
        ticket = submit(tier, name(number), content(1))
        refused = (
            tier.submit_store(name(number), content(2)) is None
            and tier.lookup([name(number).key]) != [Lookup.HIT]
            and tier.submit_load(name(number).key, aligned_bytes(BLOCK_BYTES)) is None
        )
        # A store that ended in the middle of the questions says nothing: ask about another.
        if is_under_way := tier.stats().stores == number - 1:
            assert refused
            tier.clear()
        assert wait(tier, ticket)[ticket].outcome is TierOutcome.DONE
        if is_under_way:
            assert bytes(load(tier, name(number).key)) == bytes(content(1))
            return
    raise AssertionError("each store ended before the tier could be asked")


def test_no_load_of_what_is_not_there(tier: StoreTier) -> None:
    store(tier, name(1), content(1))
    assert tier.submit_load(name(2).key, aligned_bytes(BLOCK_BYTES)) is None
    assert tier.submit_load(name(1).key, aligned_bytes(BLOCK_BYTES - 1)) is None
    assert tier.submit_load(name(1).key, aligned_bytes(BLOCK_BYTES * 2)) is None
    assert tier.stats().in_flight == 0


def test_several_loads_of_one_block_at_a_time(tier: StoreTier) -> None:
    store(tier, name(1), content(1))
    targets = [aligned_bytes(BLOCK_BYTES) for _ in range(3)]
    tickets = [tier.submit_load(name(1).key, target) for target in targets]
    assert None not in tickets
    assert tier.clear() == 0
    wait(tier, *(ticket for ticket in tickets if ticket is not None))
    assert all(bytes(target) == bytes(content(1)) for target in targets)
    assert tier.clear() == 1


def test_what_is_under_way_is_bounded(tier: StoreTier) -> None:
    store(tier, name(0), content(0))
    tickets: list[int] = []
    target = aligned_bytes(BLOCK_BYTES)
    # A load may end on a thread of the tier while others are submitted: it counts no more.
    while len(tickets) < 4096 and (ticket := tier.submit_load(name(0).key, target)) is not None:
        tickets.append(ticket)
        assert tier.stats().in_flight <= min(len(tickets), 1024)
    assert tickets
    assert len(wait(tier, *tickets)) == len(tickets)
    assert tier.stats().in_flight == 0
    assert bytes(load(tier, name(0).key)) == bytes(content(0))


def test_fd_is_quiet_when_nothing_is_under_way(tier: StoreTier) -> None:
    store(tier, name(1), content(1))
    load(tier, name(1).key)
    while select.select([tier.fd], [], [], 0)[0]:
        assert tier.poll() == []


def test_clear_forgets_every_block(tier: StoreTier) -> None:
    for number in range(5):
        store(tier, name(number, number - 1 if number else None), content(number))
    assert tier.clear() == 5
    assert tier.clear() == 0
    assert hits(tier, *range(5)) == []
    assert tier.stats().num_blocks == 0
    store(tier, name(2), content(2))
    assert bytes(load(tier, name(2).key)) == bytes(content(2))


def needs_budget(tier: StoreTier) -> None:
    if not tier.stats().capacity_bytes:
        pytest.skip("this tier has no budget of its own: its peers evict")


def fill(tier: StoreTier, first: int) -> int:
    """Store single blocks until one is evicted; the number after the last one."""
    number = first
    while not tier.stats().evictions:
        store(tier, name(number), content(number))
        number += 1
        assert number - first <= 2 * CAPACITY_BYTES // BLOCK_BYTES
    return number


def test_the_block_that_was_used_longest_ago_goes_first(tier: StoreTier) -> None:
    needs_budget(tier)
    for number in range(20):
        store(tier, name(number), content(number))
    for number in range(10):
        load(tier, name(number).key)
    fill(tier, 100)
    left = hits(tier, *range(20))
    oldest_first = [*range(10, 20), *range(10)]
    assert left == sorted(oldest_first[20 - len(left) :])


def test_no_block_goes_before_its_descendants(tier: StoreTier) -> None:
    needs_budget(tier)
    for number in range(10):
        store(tier, name(number, number - 1 if number else None), content(number))
    fill(tier, 100)
    for number in range(1000, 1000 + CAPACITY_BYTES // BLOCK_BYTES // 2):
        left = hits(tier, *range(10))
        assert left == list(range(len(left)))
        store(tier, name(number), content(number))


def test_the_budget_holds(tier: StoreTier) -> None:
    needs_budget(tier)
    num_blocks = 3 * CAPACITY_BYTES // BLOCK_BYTES
    for number in range(num_blocks):
        store(tier, name(number), content(number))
        assert tier.stats().used_bytes <= CAPACITY_BYTES
    stats = tier.stats()
    assert stats.stores == num_blocks
    assert stats.num_blocks + stats.evictions == num_blocks
    # Half of the budget at least is put to use.
    assert stats.num_blocks * BLOCK_BYTES >= CAPACITY_BYTES // 2
    last = num_blocks - 1
    assert bytes(load(tier, name(last).key)) == bytes(content(last))


def test_a_block_larger_than_the_budget_is_refused(tier: StoreTier) -> None:
    store(tier, name(1), content(1))
    assert tier.submit_store(name(2), aligned_bytes(2 * CAPACITY_BYTES)) is None
    assert hits(tier, 1, 2) == [1]


def test_counters(tier: StoreTier) -> None:
    for number in range(3):
        store(tier, name(number), content(number))
    load(tier, name(0).key)
    tier.submit_load(name(9).key, aligned_bytes(BLOCK_BYTES))
    stats = tier.stats()
    assert stats.name == tier.name
    assert (stats.available, stats.problem) == (True, "")
    assert (stats.stores, stats.stored_bytes) == (3, 3 * BLOCK_BYTES)
    assert (stats.loads, stats.loaded_bytes) == (1, BLOCK_BYTES)
    assert (stats.num_blocks, stats.missing, stats.in_flight) == (3, 1, 0)
    assert (stats.corrupt, stats.failures, stats.evictions) == (0, 0, 0)
    assert stats.load_bytes_per_s > 0
    assert stats.store_bytes_per_s > 0


@pytest.mark.parametrize("kind", TIERS)
def test_close_with_work_under_way(kind: str, tmp_path: Path) -> None:
    tier = open_tier(kind, tmp_path)
    store(tier, name(0), content(0))
    memory = [content(number) for number in range(1, 5)]
    assert tier.submit_load(name(0).key, memory[0]) is not None
    for number, block in enumerate(memory[1:], 1):
        tier.submit_store(name(number), block)
    tier.close()
