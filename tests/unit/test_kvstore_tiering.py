"""Promotion and demotion, step by step: the service over tiers that end their work when told."""

from __future__ import annotations

import os
import selectors
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

import numpy as np
import pytest

from banaserve.kvstore import wire
from banaserve.kvstore.attached_tier import AttachedTier
from banaserve.kvstore.board import Board, BoardView
from banaserve.kvstore.fingerprint import PAGE_BYTES, Fingerprint
from banaserve.kvstore.interface import Lookup, Slot
from banaserve.kvstore.pool import Pool
from banaserve.kvstore.promoter import PROBE_AFTER_S
from banaserve.kvstore.service import StoreService
from banaserve.kvstore.stats import TierReport
from banaserve.kvstore.tiering import HUNG_AFTER_S, NOTE_EVERY_S, Tiering
from banaserve.kvstore.tiers.interface import (
    BlockBytes,
    BlockName,
    Completion,
    Outcome,
    TierStats,
)
from banaserve.kvstore.watcher import PoolWatcher

NUM_SLOTS = 8
KEYS = [bytes([number + 1]) * 32 for number in range(32)]
FINGERPRINT = Fingerprint(
    model="m",
    dtype="float32",
    block_size_tokens=16,
    num_layers=2,
    num_kv_heads=2,
    head_size=8,
    layout="LBHNC",
    page_bytes=2048,
)
NAMESPACE = FINGERPRINT.namespace()
HIT, MISS, PENDING = Lookup.HIT, Lookup.MISS, Lookup.PENDING


class ScriptedTier:
    """A tier in a dictionary that takes up to ``depth`` copies and ends them when told to."""

    def __init__(self, name: str, depth: int = 100) -> None:
        self.name = name
        self.depth = depth
        self.blocks: dict[bytes, bytes] = {}
        self.parents: dict[bytes, bytes | None] = {}
        self.asking: set[bytes] = set()
        self.loads: dict[int, tuple[bytes, BlockBytes]] = {}
        self.stores: dict[int, tuple[BlockName, BlockBytes]] = {}
        self.order: list[str] = []
        self.ended: list[Completion] = []
        self.raises: Exception | None = None
        self.takes_stores = True
        self.problem = ""
        self.closed = False
        self.last_ticket = 0
        self.fd = os.eventfd(0, os.EFD_NONBLOCK)

    def lookup(self, keys: Sequence[bytes]) -> list[Lookup]:
        self.maybe_raise()
        return [
            HIT if key in self.blocks else PENDING if key in self.asking else MISS for key in keys
        ]

    def submit_store(self, block: BlockName, source: BlockBytes) -> int | None:
        self.maybe_raise()
        if block.key in self.blocks or self.is_full() or not self.takes_stores:
            return None
        self.last_ticket += 1
        self.stores[self.last_ticket] = (block, source)
        self.order.append("store")
        return self.last_ticket

    def submit_load(self, key: bytes, target: BlockBytes) -> int | None:
        self.maybe_raise()
        if len(self.blocks.get(key, b"")) != target.size or self.is_full():
            return None
        self.last_ticket += 1
        self.loads[self.last_ticket] = (key, target)
        self.order.append("load")
        return self.last_ticket

    def is_full(self) -> bool:
        return len(self.loads) + len(self.stores) >= self.depth

    def maybe_raise(self) -> None:
        if self.raises is not None:
            raise self.raises

    def end(self, outcome: Outcome = Outcome.DONE, *, only: str = "") -> None:
        """Carry out what is under way; of a load that fails half is written."""
        loads = {} if only == "store" else self.loads
        for ticket, (key, target) in list(loads.items()):
            data = np.frombuffer(self.blocks[key], np.uint8)
            part = target.size if outcome is Outcome.DONE else target.size // 2
            target[:part] = data[:part]
            del self.loads[ticket]
            self.ended.append(Completion(ticket, outcome, target.size, 0.0))
            if outcome in (Outcome.MISSING, Outcome.CORRUPT):
                del self.blocks[key]
        stores = {} if only == "load" else self.stores
        for ticket, (block, source) in list(stores.items()):
            if outcome is Outcome.DONE:
                self.blocks[block.key] = source.tobytes()
                self.parents[block.key] = block.parent
            del self.stores[ticket]
            self.ended.append(Completion(ticket, outcome, source.size, 0.0))
        os.eventfd_write(self.fd, 1)

    def poll(self) -> list[Completion]:
        self.maybe_raise()
        os.eventfd_read(self.fd)
        ended, self.ended = self.ended, []
        return ended

    def evict(self, key: bytes) -> bool:
        return self.blocks.pop(key, None) is not None

    def clear(self) -> int:
        number = len(self.blocks)
        self.blocks.clear()
        return number

    def stats(self) -> TierStats:
        return TierStats(
            name=self.name,
            num_blocks=len(self.blocks),
            available=not self.problem,
            problem=self.problem,
        )

    def check(self) -> None:
        assert not self.closed

    def close(self) -> None:
        self.closed = True
        self.loads.clear()
        self.stores.clear()


class Store:
    """A service over scripted tiers, in virtual time."""

    def __init__(
        self, stack: ExitStack, *tiers: ScriptedTier, quota: float = 1.0, verifies: bool = False
    ) -> None:
        self.now_s = 100.0
        self.pool = Pool(NUM_SLOTS * PAGE_BYTES)
        self.board = Board(self.pool.num_bytes)
        self.selector = selectors.DefaultSelector()
        attached = [AttachedTier(tier.name, tier) for tier in tiers]
        self.tiering = Tiering(attached, self.selector, lambda: self.now_s)
        watcher = PoolWatcher(self.board, self.tiering, poisons=True, verifies=verifies)
        self.service = StoreService(self.pool, self.tiering, watcher, quota)
        for close in (self.selector.close, self.board.close, self.pool.close):
            stack.callback(close)
        stack.callback(self.tiering.close, 5.0)
        hello = wire.Hello(1, wire.PROTOCOL_VERSION, "here", FINGERPRINT)
        welcome = self.service.greet(1, hello)
        assert isinstance(welcome, wire.Welcome)
        self.generation = welcome.generation
        self.view = BoardView(self.board.fd, self.pool.num_bytes, self.generation)

    def turn(self, timeout_s: float = 0.0) -> None:
        """What the daemon's loop does once."""
        for key, events in self.selector.select(timeout_s):
            key.data(events)
        self.tiering.pump()
        self.service._index.check()

    def exchange(
        self,
        acquire: Sequence[bytes] = (),
        reserve: Sequence[tuple[bytes, bytes | None]] = (),
        tenant: bytes = b"",
        compute_block_s: float = 0.0,
    ) -> wire.Granted:
        request = wire.Exchange(2, list(acquire), list(reserve), tenant, compute_block_s)
        granted = self.service.answer(1, request)
        assert isinstance(granted, wire.Granted)
        self.turn()
        return granted

    def write(self, *keys: bytes, tenant: bytes = b"") -> None:
        """Store a chain of blocks whose bytes are the first byte of their key."""
        parents = [None, *keys[:-1]]
        reserved = self.exchange((), list(zip(keys, parents, strict=True)), tenant).reserved
        serials = []
        for key, pair in zip(keys, reserved, strict=True):
            assert pair is not None
            self.memory(pair)[:] = key[0]
            serials.append(pair[1])
        commit = wire.Commit(3, self.generation, serials, 0)
        assert self.service.answer(1, commit) == wire.Committed(3, True)
        self.turn()

    def forget(self) -> None:
        """Empty memory, and memory only."""
        self.service._index.clear()

    def memory(self, pair: tuple[int, int]) -> BlockBytes:
        return self.pool.part(pair[0] * PAGE_BYTES, PAGE_BYTES)

    def release(self, granted: wire.Granted) -> None:
        assert granted.lease_id is not None
        self.service.answer(1, wire.Release(self.generation, granted.lease_id))
        self.turn()

    def arrivals(self, granted: wire.Granted) -> list[Lookup]:
        return self.view.states([Slot(i, self.generation, s) for i, s in granted.slots])

    def lookup(self, *keys: bytes) -> list[Lookup]:
        looked = self.service.answer(1, wire.LookupKeys(4, list(keys)))
        assert isinstance(looked, wire.Looked)
        return [Lookup(state) for state in looked.states]

    def report(self, number: int = 0) -> TierReport:
        return self.service.stats().tiers[number]


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def filled(stack: ExitStack, *keys: bytes, depth: int = 100) -> tuple[Store, ScriptedTier]:
    """A store whose blocks are in the tier and no longer in memory."""
    tier = ScriptedTier("disk", depth)
    store = Store(stack, tier)
    for first in range(0, len(keys), 4):
        store.write(*keys[first : first + 4])
        while tier.stores:
            tier.end()
            store.turn()
        store.forget()
    assert set(tier.blocks) == {NAMESPACE + key for key in keys}
    return store, tier


# ---- demotion


def test_a_committed_block_is_written_behind_with_its_parent(stack: ExitStack) -> None:
    store, tier = filled(stack, *KEYS[:2])
    assert tier.blocks[NAMESPACE + KEYS[1]] == KEYS[1][:1] * PAGE_BYTES
    assert tier.parents == {NAMESPACE + KEYS[0]: None, NAMESPACE + KEYS[1]: NAMESPACE + KEYS[0]}
    report = store.report()
    assert (report.demoted, report.backlog_blocks, report.dropped_before_demotion) == (2, 0, 0)


def test_writes_in_flight_are_bounded_and_pinned(stack: ExitStack) -> None:
    tier = ScriptedTier("disk")
    store = Store(stack, tier)
    store.write(*KEYS[:4])
    assert len(tier.stores) == 1
    assert store.report().backlog_blocks == 3
    store.forget()
    assert store.lookup(*KEYS[:4]) == [HIT, MISS, MISS, MISS]
    assert store.report().dropped_before_demotion == 3
    tier.end()
    store.turn()
    store.forget()
    assert store.service.stats().used_slots == 0
    assert store.report().demoted == 1


def test_a_block_that_a_tier_has_is_not_written_again(stack: ExitStack) -> None:
    store, tier = filled(stack, KEYS[0])
    store.write(KEYS[0])
    assert not tier.stores
    assert (store.report().demoted, store.report().backlog_blocks) == (1, 0)


def test_a_failed_write_is_counted_and_the_block_stays(stack: ExitStack) -> None:
    tier = ScriptedTier("disk")
    store = Store(stack, tier)
    store.write(KEYS[0])
    tier.end(Outcome.FAILED)
    store.turn()
    assert store.report().demotion_failures == 1
    assert store.lookup(KEYS[0]) == [HIT]
    store.forget()
    assert store.service.stats().used_slots == 0


def test_a_tier_that_takes_nothing_now_gets_it_later(stack: ExitStack) -> None:
    tier = ScriptedTier("disk")
    tier.takes_stores = False
    store = Store(stack, tier)
    store.write(*KEYS[:2])
    assert store.report().backlog_blocks == 2
    tier.takes_stores = True
    for _ in range(2):
        store.turn()
        tier.end()
    store.turn()
    assert len(tier.blocks) == 2


# ---- promotion


def test_blocks_come_up_into_leased_slots(stack: ExitStack) -> None:
    store, tier = filled(stack, *KEYS[:3])
    granted = store.exchange(KEYS[:4])
    assert (len(granted.slots), granted.num_ready, granted.undecided) == (3, 0, False)
    assert granted.wait_s > 0
    assert store.arrivals(granted) == [PENDING] * 3
    assert store.lookup(*KEYS[:4]) == [PENDING] * 3 + [MISS]
    stats = store.service.stats()
    assert (stats.promoting_slots, stats.hits, stats.misses) == (3, 0, 4)
    tier.end()
    store.turn()
    assert store.arrivals(granted) == [HIT] * 3
    for key, pair in zip(KEYS, granted.slots, strict=False):
        assert (store.memory(pair) == key[0]).all()
    assert store.report().promoted == 3
    again = store.exchange(KEYS[:3])
    assert (again.slots, again.num_ready, again.wait_s) == (granted.slots, 3, 0.0)


def test_what_came_from_a_tier_is_not_written_to_it(stack: ExitStack) -> None:
    store, tier = filled(stack, KEYS[0])
    store.exchange([KEYS[0]])
    tier.end()
    store.turn()
    assert tier.order == ["store", "load"]
    assert store.report().backlog_blocks == 0


def test_a_second_reader_joins(stack: ExitStack) -> None:
    store, tier = filled(stack, *KEYS[:2])
    first, second = store.exchange(KEYS[:2]), store.exchange(KEYS[:2])
    assert first.slots == second.slots
    assert second.num_ready == 0
    assert second.wait_s > 0
    assert len(tier.loads) == 2
    assert store.service.stats().joined == 2
    store.release(first)
    tier.end()
    store.turn()
    assert store.arrivals(second) == [HIT, HIT]


def test_a_promotion_nobody_waits_for_any_more_goes_on(stack: ExitStack) -> None:
    store, tier = filled(stack, KEYS[0])
    store.release(store.exchange([KEYS[0]]))
    assert store.lookup(KEYS[0]) == [PENDING]
    tier.end()
    store.turn()
    assert store.exchange([KEYS[0]]).num_ready == 1


@pytest.mark.parametrize("outcome", [Outcome.FAILED, Outcome.MISSING, Outcome.CORRUPT])
def test_a_failed_promotion_frees_its_slot_with_the_last_lease(
    stack: ExitStack, outcome: Outcome
) -> None:
    store, tier = filled(stack, *KEYS[:2])
    granted = store.exchange(KEYS[:2])
    tier.end(outcome)
    store.turn()
    assert store.arrivals(granted) == [MISS, MISS]
    assert store.service._index.lookup([NAMESPACE + KEYS[0]]) == [MISS]
    assert store.report().promotion_failures == 2
    assert store.service.stats().used_slots == 2
    # The key is free at once, the slot is not.
    (pair,) = store.exchange((), [(KEYS[0], None)]).reserved
    assert pair is not None
    assert pair[0] not in [index for index, _ in granted.slots]
    store.release(granted)
    assert store.service.stats().used_slots == 1
    assert (store.memory(granted.slots[1]) == 0xFF).all()


def test_a_failed_promotion_is_tried_in_the_next_tier(stack: ExitStack) -> None:
    fast, slow = ScriptedTier("fast"), ScriptedTier("slow")
    store = Store(stack, fast, slow)
    store.write(KEYS[0])
    for tier in (fast, slow):
        tier.end()
    store.turn()
    store.forget()
    granted = store.exchange([KEYS[0]])
    assert (len(fast.loads), len(slow.loads)) == (1, 0)
    fast.end(Outcome.CORRUPT)
    store.turn()
    assert store.arrivals(granted) == [PENDING]
    slow.end()
    store.turn()
    assert store.arrivals(granted) == [HIT]
    assert (store.memory(granted.slots[0]) == KEYS[0][0]).all()
    assert (store.report(0).promotion_failures, store.report(1).promoted) == (1, 1)
    # The tier that had lost it gets it again.
    fast.end()
    assert NAMESPACE + KEYS[0] in fast.blocks


def test_a_chain_over_memory_and_two_tiers(stack: ExitStack) -> None:
    fast, slow = ScriptedTier("fast"), ScriptedTier("slow")
    store = Store(stack, fast, slow)
    block = b"x" * PAGE_BYTES
    fast.blocks = {NAMESPACE + KEYS[1]: block}
    slow.blocks = {NAMESPACE + key: block for key in (KEYS[1], KEYS[2])}
    store.write(KEYS[0])
    store.write(KEYS[3])
    granted = store.exchange(KEYS[:5])
    assert (len(granted.slots), granted.num_ready) == (4, 1)
    assert store.arrivals(granted) == [HIT, PENDING, PENDING, HIT]
    assert (len(fast.loads), len(slow.loads)) == (1, 1)


def test_an_undecided_tier_ends_the_walk(stack: ExitStack) -> None:
    store, tier = filled(stack, KEYS[0])
    tier.asking = {NAMESPACE + KEYS[1]}
    granted = store.exchange(KEYS[:3])
    assert (len(granted.slots), granted.undecided) == (1, True)
    assert store.lookup(*KEYS[:3]) == [PENDING, PENDING, MISS]
    assert not store.exchange(KEYS[5:6]).undecided


def test_a_full_queue_delays_and_loses_nothing(stack: ExitStack) -> None:
    store, tier = filled(stack, *KEYS[:4], depth=1)
    granted = store.exchange(KEYS[:4])
    assert len(granted.slots) == 4
    for number in range(4):
        assert len(tier.loads) == 1
        assert store.arrivals(granted) == [HIT] * number + [PENDING] * (4 - number)
        tier.end()
        store.turn()
    assert store.arrivals(granted) == [HIT] * 4


def test_promotions_leave_slots_to_writers(stack: ExitStack) -> None:
    store, _ = filled(stack, *KEYS[:8])
    granted = store.exchange(KEYS[:8])
    assert len(granted.slots) == NUM_SLOTS // 2
    reserved = store.exchange((), [(key, None) for key in KEYS[10:18]]).reserved
    assert sum(pair is not None for pair in reserved) == NUM_SLOTS // 2


def test_loads_go_before_stores(stack: ExitStack) -> None:
    store, tier = filled(stack, *KEYS[:2], depth=1)
    store.write(*KEYS[10:12])
    tier.order.clear()
    store.exchange(KEYS[:2])
    for _ in range(4):
        tier.end()
        store.turn()
    assert tier.order == ["load", "load", "store"]


def test_a_promoted_block_knows_its_parent(stack: ExitStack) -> None:
    store, tier = filled(stack, *KEYS[:2])
    store.exchange([KEYS[1]], [(KEYS[1], KEYS[0])])
    entry = store.service._index.get(NAMESPACE + KEYS[1])
    assert entry is not None
    assert entry.parent == NAMESPACE + KEYS[0]
    tier.end()


# ---- the gate


def taught(stack: ExitStack, load_s: float) -> tuple[Store, ScriptedTier]:
    """A store that has measured ``load_s`` for a block of its tier."""
    store, tier = filled(stack, *KEYS[:4])
    granted = store.exchange([KEYS[3]])
    store.now_s += load_s
    tier.end()
    store.turn()
    store.release(granted)
    store.forget()
    return store, tier


@pytest.mark.parametrize(
    ("compute_block_s", "num_promoted"), [(0.5, 0), (1.5, 3), (0.0, 3)], ids=str
)
def test_the_cheaper_way_is_taken(
    stack: ExitStack, compute_block_s: float, num_promoted: int
) -> None:
    store, _ = taught(stack, 1.0)
    granted = store.exchange(KEYS[:3], compute_block_s=compute_block_s)
    assert len(granted.slots) == num_promoted
    assert granted.num_declined == 3 - num_promoted
    assert store.report().declined == 3 - num_promoted
    assert granted.wait_s == pytest.approx(1.0 * num_promoted)


def test_predicted_and_measured_seconds_are_summed(stack: ExitStack) -> None:
    store, tier = taught(stack, 1.0)
    store.exchange(KEYS[:2])
    store.now_s += 3.0
    tier.end()
    store.turn()
    report = store.report()
    assert report.predicted_fetch_s == pytest.approx(1.0 + 2.0)
    assert report.measured_fetch_s == pytest.approx(3.0 + 3.0)


def test_a_tier_that_was_slow_once_is_measured_again(stack: ExitStack) -> None:
    store, tier = taught(stack, 60.0)
    assert not store.exchange(KEYS[:3], compute_block_s=0.5).slots
    assert not tier.loads
    store.now_s += PROBE_AFTER_S + 1
    assert not store.exchange(KEYS[:3], compute_block_s=0.5).slots
    assert len(tier.loads) == 1
    store.now_s += 0.01
    tier.end()
    store.turn()
    assert store.lookup(KEYS[0]) == [HIT]
    assert store.service.stats().num_leases == 0


# ---- tiers that fail


def test_a_tier_that_raises_is_gone_without(stack: ExitStack) -> None:
    store, tier = filled(stack, *KEYS[:2])
    tier.raises = RuntimeError("out\nof order")
    assert not store.exchange(KEYS[:2]).slots
    stats = store.report().stats
    assert not stats.available
    assert stats.problem == "RuntimeError: out of order"
    store.turn(5.0)
    assert tier.closed
    store.write(KEYS[5])
    assert store.exchange([KEYS[5]]).num_ready == 1
    assert store.report().backlog_blocks == 0


def test_the_log_says_once_that_a_tier_is_away_and_once_that_it_is_back(
    stack: ExitStack, caplog: pytest.LogCaptureFixture
) -> None:
    store, tier = filled(stack, KEYS[0])
    for problem in ("", "the peer is away", "the peer is away", "", ""):
        tier.problem = problem
        store.now_s += NOTE_EVERY_S
        store.turn()
    assert [record.message for record in caplog.records] == [
        "going on without the disk tier: the peer is away",
        "the disk tier serves again",
    ]


def test_a_tier_that_does_not_end_a_load_is_gone_without(stack: ExitStack) -> None:
    store, tier = filled(stack, *KEYS[:2])
    granted = store.exchange(KEYS[:2])
    store.now_s += HUNG_AFTER_S
    store.turn()
    assert store.arrivals(granted) == [PENDING, PENDING]
    store.now_s += NOTE_EVERY_S
    store.turn()
    assert store.arrivals(granted) == [MISS, MISS]
    assert "has not ended" in store.report().stats.problem
    # What it may still write to stays taken until it has closed.
    assert store.service.stats().used_slots == 2
    store.release(granted)
    store.turn(5.0)
    assert tier.closed
    assert store.service.stats().used_slots == 0


def test_a_tier_is_not_gone_without_for_what_waited_for_its_turn(stack: ExitStack) -> None:
    store, tier = filled(stack, *KEYS[:2], depth=1)
    granted = store.exchange(KEYS[:2])
    store.now_s += HUNG_AFTER_S
    tier.end()
    store.turn()
    store.now_s += NOTE_EVERY_S
    store.turn()
    assert store.arrivals(granted) == [HIT, PENDING]
    tier.end()
    store.turn()
    assert store.arrivals(granted) == [HIT, HIT]
    store.release(granted)


def test_slots_wait_for_a_tier_that_raised_in_the_middle(stack: ExitStack) -> None:
    store, tier = filled(stack, *KEYS[:2])
    granted = store.exchange(KEYS[:2])
    store.write(KEYS[5])
    tier.raises = RuntimeError("out of order")
    os.eventfd_write(tier.fd, 1)
    store.turn()
    assert store.arrivals(granted) == [MISS, MISS]
    store.release(granted)
    # Closed in another thread, after which the slots are free.
    store.turn(5.0)
    assert tier.closed
    assert store.service.stats().used_slots == 1
    store.forget()
    assert store.service.stats().used_slots == 0


def test_a_tier_that_cannot_even_close_keeps_its_slots(stack: ExitStack) -> None:
    store, tier = filled(stack, *KEYS[:2])
    tier.close = lambda: 1 / 0  # type: ignore[assignment, method-assign, return-value]
    store.release(store.exchange(KEYS[:2]))
    tier.raises = RuntimeError("out of order")
    os.eventfd_write(tier.fd, 1)
    store.turn()
    store.turn(5.0)
    store.forget()
    assert store.service.stats().used_slots == 2


# ---- the end, and other geometries


def test_draining_writes_what_is_left(stack: ExitStack) -> None:
    store, tier = filled(stack, KEYS[9])
    tier.asking = set()
    store.write(*KEYS[:4])
    submit = tier.submit_store

    def at_once(block: BlockName, source: BlockBytes) -> int | None:
        ticket = submit(block, source)
        tier.end()
        return ticket

    tier.submit_store = at_once  # type: ignore[method-assign]
    tier.end()
    assert store.tiering.drain(5.0)
    assert {NAMESPACE + key for key in KEYS[:4]} <= set(tier.blocks)


def test_another_slot_size_waits_for_copies_under_way(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("banaserve.kvstore.service.SETTLE_S", 0.0)
    store, tier = filled(stack, KEYS[0])
    store.release(store.exchange([KEYS[0]]))
    store.service.leave(1)
    wide = Fingerprint(**{f: getattr(FINGERPRINT, f) for f in FINGERPRINT.__struct_fields__})
    wide = Fingerprint(
        **{f: getattr(wide, f) for f in wide.__struct_fields__ if f != "page_bytes"},
        page_bytes=4096,
    )
    hello = wire.Hello(1, wire.PROTOCOL_VERSION, "wide", wide)
    refused = store.service.greet(2, hello)
    assert isinstance(refused, wire.Refused)
    assert not refused.because_of_fingerprint
    tier.end()
    store.turn()
    assert isinstance(store.service.greet(2, hello), wire.Welcome)
    assert store.service.stats().used_slots == 0


def test_clear_empties_memory_and_tiers(stack: ExitStack) -> None:
    store, tier = filled(stack, *KEYS[:4])
    store.write(KEYS[5])
    tier.end()
    store.turn()
    assert store.service.answer(1, wire.Clear(5)) == wire.Cleared(5, 1, 5)
    assert store.lookup(KEYS[0], KEYS[5]) == [MISS, MISS]


# ---- checksums of memory


def test_memory_that_changed_is_dropped_and_comes_from_the_tier(stack: ExitStack) -> None:
    tier = ScriptedTier("disk")
    store = Store(stack, tier, verifies=True)
    store.write(*KEYS[:2])
    for _ in range(2):
        tier.end()
        store.turn()
    held = store.exchange(KEYS[:2])
    store.memory(held.slots[1])[7] ^= 1
    granted = store.exchange(KEYS[:2])
    assert (len(granted.slots), granted.num_ready) == (2, 1)
    assert granted.slots[1] != held.slots[1]
    assert store.arrivals(held) == [HIT, MISS]
    tier.end()
    store.turn()
    assert store.arrivals(granted) == [HIT, HIT]
    assert store.service.stats().corrupt_blocks == 1


def test_memory_that_changed_is_not_written_to_a_tier(stack: ExitStack) -> None:
    tier = ScriptedTier("disk")
    store = Store(stack, tier, verifies=True)
    store.write(*KEYS[:2])
    entry = store.service._index.get(NAMESPACE + KEYS[1])
    assert entry is not None
    store.memory((entry.slot, 0))[0] ^= 1
    tier.end()
    store.turn()
    assert not tier.stores
    assert store.lookup(KEYS[1]) == [MISS]
    assert store.report().dropped_before_demotion == 1
