"""Promotion and its gate, step by step: the service over tiers that end their work when told."""

from __future__ import annotations

from contextlib import ExitStack

import pytest

from banaserve.kvstore.daemon.tiering.promoter import PROBE_AFTER_S
from banaserve.kvstore.fingerprint import PAGE_BYTES
from banaserve.kvstore.tiers.interface import TierOutcome
from tiering_doubles import (
    ASKED,
    HIT,
    KEYS,
    MISS,
    NAMESPACE,
    NUM_SLOTS,
    PENDING,
    ScriptedTier,
    Store,
    filled,
)


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


@pytest.mark.parametrize("outcome", [TierOutcome.FAILED, TierOutcome.MISSING, TierOutcome.CORRUPT])
def test_a_failed_promotion_frees_its_slot_with_the_last_lease(
    stack: ExitStack, outcome: TierOutcome
) -> None:
    store, tier = filled(stack, *KEYS[:2])
    granted = store.exchange(KEYS[:2])
    tier.end(outcome)
    store.turn()
    assert store.arrivals(granted) == [MISS, MISS]
    assert store.service.index.lookup([NAMESPACE + KEYS[0]]) == [MISS]
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
    fast.end(TierOutcome.CORRUPT)
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
    assert store.lookup(*KEYS[:3]) == [PENDING, ASKED, MISS]
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


def test_a_full_queue_loses_nothing_where_a_peer_is_asked_again(stack: ExitStack) -> None:
    store, tier = filled(stack, *KEYS[:2], depth=1)
    granted = store.exchange(KEYS[:2])
    name = NAMESPACE + KEYS[1]
    block = tier.blocks.pop(name)
    tier.asking = {name}
    store.turn()
    tier.blocks[name] = block
    for _ in range(2):
        tier.end()
        store.turn()
    assert store.arrivals(granted) == [HIT, HIT]


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
    entry = store.service.index.get(NAMESPACE + KEYS[1])
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
