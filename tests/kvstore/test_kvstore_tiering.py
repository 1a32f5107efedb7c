"""Demotion, failing tiers and the end: the service over tiers that end their work when told."""

from __future__ import annotations

import os
import threading
from contextlib import ExitStack

import msgspec
import pytest

from banaserve.kvstore import wire
from banaserve.kvstore.daemon.tiering.tiering import HUNG_AFTER_S, NOTE_EVERY_S
from banaserve.kvstore.fingerprint import PAGE_BYTES
from banaserve.kvstore.stats import still_held
from banaserve.kvstore.tiers.interface import BlockBytes, BlockName, TierOutcome
from tiering_doubles import (
    FINGERPRINT,
    HIT,
    KEYS,
    MISS,
    NAMESPACE,
    PENDING,
    ScriptedTier,
    Store,
    filled,
)
from waiting import eventually

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
    tier.end(TierOutcome.FAILED)
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
    _until_closed(store, tier, 0)


def _until_closed(store: Store, tier: ScriptedTier, num_slots: int) -> None:
    """A tier is closed in another thread, after which all but ``num_slots`` slots are free."""

    def is_over() -> bool:
        store.turn()
        return tier.closed and store.service.stats().used_slots == num_slots

    eventually(is_over)


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
    _until_closed(store, tier, 1)
    store.forget()
    assert store.service.stats().used_slots == 0


def test_a_closed_tier_is_noticed_by_whoever_comes_first(stack: ExitStack) -> None:
    store, tier = filled(stack, *KEYS[:2])
    store.release(store.exchange(KEYS[:2]))
    tier.raises = RuntimeError("out of order")
    os.eventfd_write(tier.fd, 1)
    store.turn()
    # One round of events, in the middle of which a connection has the pool cut anew.
    events = store.selector.select(5.0)
    assert store.tiering.settle(5.0)
    for key, mask in events:
        key.data(mask)
    assert store.service.stats().used_slots == 0


def no_thread(_thread: threading.Thread) -> None:
    raise RuntimeError("can't start new thread")


@pytest.mark.parametrize("has_threads", [True, False])
def test_a_tier_that_cannot_even_close_keeps_its_slots(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch, has_threads: bool
) -> None:
    store, tier = filled(stack, *KEYS[:2])
    tier.close = lambda: 1 / 0  # type: ignore[assignment, method-assign]
    if not has_threads:
        monkeypatch.setattr(threading.Thread, "start", no_thread)
    store.release(store.exchange(KEYS[:2]))
    tier.raises = RuntimeError("out of order")
    os.eventfd_write(tier.fd, 1)
    store.turn()
    store.turn(5.0)
    store.forget()
    assert store.service.stats().used_slots == 2


# ---- the end, and other geometries


def test_the_end_does_not_wait_for_a_tier_without_a_thread_to_close_it(
    stack: ExitStack, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, tier = filled(stack, KEYS[0])
    monkeypatch.setattr(threading.Thread, "start", no_thread)
    stack.close()
    assert not tier.closed


def test_draining_writes_what_is_left(stack: ExitStack) -> None:
    store, tier = filled(stack, KEYS[9])
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
    monkeypatch.setattr("banaserve.kvstore.daemon.service.SETTLE_S", 0.0)
    store, tier = filled(stack, KEYS[0])
    store.release(store.exchange([KEYS[0]]))
    store.service.leave(1)
    wide = msgspec.structs.replace(FINGERPRINT, page_bytes=4096)
    hello = wire.ClientHello(1, wire.PROTOCOL_VERSION, "wide", wide)
    refused = store.service.greet(2, hello)
    assert isinstance(refused, wire.ClientRefused)
    assert not refused.because_of_fingerprint
    tier.end()
    store.turn()
    assert isinstance(store.service.greet(2, hello), wire.Welcome)
    assert store.service.stats().used_slots == 0


def test_a_block_that_arrives_while_the_pool_is_cut_anew_is_written_nowhere(
    stack: ExitStack,
) -> None:
    peer, disk = ScriptedTier("peer"), ScriptedTier("disk")
    store = Store(stack, peer, disk)
    disk.takes_stores = False  # as in the pause after a failed write
    store.write(*KEYS[:2])
    while peer.stores:
        peer.end()
        store.turn()
    store.tiering.tiers[1].backlog.clear()
    store.forget()
    store.release(store.exchange(KEYS[:2]))
    peer.end(only="load")
    store.service.leave(1)
    wide = msgspec.structs.replace(FINGERPRINT, page_bytes=4096)
    hello = wire.ClientHello(1, wire.PROTOCOL_VERSION, "wide", wide)
    assert isinstance(store.service.greet(2, hello), wire.Welcome)
    disk.takes_stores = True
    store.turn()
    assert disk.stores == {}


def test_clear_empties_memory_and_tiers(stack: ExitStack) -> None:
    store, tier = filled(stack, *KEYS[:4])
    store.write(KEYS[5])
    tier.end()
    store.turn()
    assert store.service.answer(1, wire.Clear(5)) == wire.Cleared(5, 1, 5)
    assert store.lookup(KEYS[0], KEYS[5]) == [MISS, MISS]
    assert still_held(store.service.stats()) == []


def test_what_clear_has_left_is_said(stack: ExitStack) -> None:
    store, tier = filled(stack, *KEYS[:4])
    held = store.exchange([KEYS[0]])  # the tier is reading it
    store.service.answer(1, wire.Clear(5))
    left = still_held(store.service.stats())
    assert left == [
        "1 slots of memory are in use",
        "the disk tier has 1 blocks, and 1 reads and writes are under way",
    ]
    tier.end()
    store.turn()
    store.release(held)
    store.service.answer(1, wire.Clear(6))
    assert still_held(store.service.stats()) == []
    tier.problem = "the disk is full"
    assert still_held(store.service.stats()) == [
        "the disk tier is out of service: the disk is full"
    ]


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
    entry = store.service.index.get(NAMESPACE + KEYS[1])
    assert entry is not None
    store.memory((entry.slot, 0))[0] ^= 1
    tier.end()
    store.turn()
    assert not tier.stores
    assert store.lookup(KEYS[1]) == [MISS]
    assert store.report().dropped_before_demotion == 1
