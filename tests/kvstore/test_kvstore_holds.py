"""Prompts on their way to decode, in a store with room for a quarter of them: none is lost."""

from __future__ import annotations

import random
from collections import deque
from contextlib import ExitStack

import pytest

from banaserve.kvstore import wire
from banaserve.kvstore.fingerprint import PAGE_BYTES
from banaserve.kvstore.index.records import HOLD_S
from banaserve.kvstore.peers.messages import OfferPush
from depth import chosen_seed
from tiering_doubles import HIT, KEYS, MISS, NAMESPACE, NUM_SLOTS, Store, filled

BLOCKS = 2
PROMPTS = {1 + n: KEYS[BLOCKS * n : BLOCKS * (n + 1)] for n in range(16)}
assert BLOCKS * len(PROMPTS) == NUM_SLOTS * 4


def prefilled(store: Store, hold: int, num_readers: int) -> bool:
    """Compute a prompt and leave it in the store; False where that has no room, as prefill asks."""
    keys = PROMPTS[hold]
    pairs = list(zip(keys, [None, *keys[:-1]], strict=True))
    granted = store.exchange((), pairs, hold=hold, num_readers=num_readers)
    serials = [pair[1] for pair in granted.reserved if pair is not None]
    if granted.num_refused:
        store.service.answer(1, wire.Abandon(store.generation, serials, None))
        store.end_hold(hold)
        return False
    assert store.service.answer(1, wire.Commit(3, store.generation, serials, 0))
    return True


def offered(hold: int, num_readers: int = 1, keys: list[bytes] | None = None) -> OfferPush:
    found = [NAMESPACE + key for key in (PROMPTS[hold] if keys is None else keys)]
    return OfferPush(hold, found, None, PAGE_BYTES, b"", hold, num_readers)


def pushed(store: Store, hold: int, num_readers: int) -> bool:
    """Have a prompt sent from another machine; False where it is not taken."""
    reception = store.service.receiving.accept(offered(hold, num_readers))
    store.service.receiving.end(reception, reception.wanted, [])
    return bool(reception.wanted)


@pytest.mark.parametrize("num_readers", [1, 3])
@pytest.mark.parametrize("leave", [prefilled, pushed])
def test_no_prompt_is_lost_before_all_of_its_decode_legs_have_read_it(
    leave, num_readers: int, stack: ExitStack
) -> None:
    """Prefill waits, and whatever others write meanwhile takes only what nobody waits for."""
    draws, store = random.Random(chosen_seed(40)), Store(stack)
    coming = deque(PROMPTS)
    legs: list[tuple[int, int]] = []
    others = iter(range(10**6))
    num_waits = 0
    while coming or legs:
        if coming and leave(store, coming[0], num_readers):
            hold = coming.popleft()
            legs += [(hold, reader) for reader in range(num_readers)]
            continue
        num_waits += bool(coming)
        store.exchange((), [(next(others).to_bytes(32, "little"), None)])
        hold, reader = legs.pop(draws.randrange(len(legs)))
        found = store.exchange(PROMPTS[hold])
        assert (len(found.slots), found.num_ready) == (BLOCKS, BLOCKS)
        store.release(found)
        store.end_hold(hold, reader)
        for serial in [pair.serial for pair in store.service.index._writing.values()]:
            store.service.answer(1, wire.Commit(3, store.generation, [serial], 0))
    assert num_waits > 0
    assert (store.service.stats().num_holds, store.service.stats().held_slots) == (0, 0)


def test_a_push_is_taken_as_a_whole_or_not_at_all(stack: ExitStack) -> None:
    store = Store(stack)
    for hold in (1, 2, 3):
        assert prefilled(store, hold, 1)
    store.exchange((), [(KEYS[20], None)])
    # One slot is left.
    assert not pushed(store, 4, 1)
    stats = store.service.stats()
    assert (stats.used_slots, stats.promoting_slots, stats.num_holds) == (7, 0, 3)
    # Without a hold what has room is taken, as for a prefix that may be of use later.
    reception = store.service.receiving.accept(OfferPush(1, offered(4).keys, None, PAGE_BYTES, b""))
    assert reception.wanted == [0]
    store.service.receiving.end(reception, [0], [])
    # Blocks that are here already are held with those that come.
    store.end_hold(1)
    both = [KEYS[BLOCKS * 3], *PROMPTS[3]]
    assert not store.service.receiving.accept(offered(3, 1, PROMPTS[3])).wanted
    store.end_hold(3)
    reception = store.service.receiving.accept(offered(5, 1, both))
    store.service.receiving.end(reception, reception.wanted, [])
    for key in (KEYS[21 + n] for n in range(NUM_SLOTS)):
        store.exchange((), [(key, None)])
    assert store.lookup(*both) == [HIT] * 3


def test_the_rest_of_a_prompt_is_not_taken_where_its_beginning_was_not(stack: ExitStack) -> None:
    """A prompt of more blocks than an offer has comes as several."""
    store = Store(stack)
    first, last = (NAMESPACE + key for key in PROMPTS[1])
    rest = OfferPush(1, [last], first, PAGE_BYTES, b"", 1)
    assert not store.service.receiving.accept(rest).wanted
    assert store.service.stats().used_slots == 0
    reception = store.service.receiving.accept(OfferPush(1, [first], None, PAGE_BYTES, b"", 1))
    store.service.receiving.end(reception, [0], [])
    assert store.service.receiving.accept(rest).wanted == [0]


def test_the_beginning_of_a_prompt_is_not_held_where_the_rest_was_not_taken(
    stack: ExitStack,
) -> None:
    """Two prompts of which each held a part of the room would keep each other's rest away."""
    store = Store(stack)
    first, last = (NAMESPACE + key for key in PROMPTS[4])
    reception = store.service.receiving.accept(OfferPush(1, [first], None, PAGE_BYTES, b"", 4))
    store.service.receiving.end(reception, [0], [])
    for hold in (1, 2, 3):
        assert prefilled(store, hold, 1)
    store.exchange((), [(KEYS[20], None)])
    assert store.service.stats().held_slots == 3 * BLOCKS + 1
    assert not store.service.receiving.accept(
        OfferPush(2, [last], first, PAGE_BYTES, b"", 4)
    ).wanted
    assert store.service.stats().held_slots == 3 * BLOCKS
    assert store.exchange((), [(KEYS[21], None)]).num_refused == 0, "its beginning gives way"


@pytest.mark.parametrize("takes", [False, True], ids=["written", "pushed"])
def test_a_hold_that_nobody_ends_is_over_after_its_time_whoever_asks(
    takes: bool, stack: ExitStack
) -> None:
    """The front door that would end it may have died, and others may hold nothing."""
    store = Store(stack)
    for hold in (1, 2, 3, 4):
        assert prefilled(store, hold, 1)
    assert store.exchange((), [(KEYS[20], None)]).num_refused == 1
    store.now_s += HOLD_S
    if takes:
        assert store.service.receiving.accept(offered(5)).wanted == [0, 1]
    else:
        assert store.exchange((), [(KEYS[20], None)]).num_refused == 0


def test_what_does_not_come_is_not_held(stack: ExitStack) -> None:
    store = Store(stack)
    reception = store.service.receiving.accept(offered(1))
    assert store.service.stats().held_slots == BLOCKS
    store.service.receiving.end(reception, [0], [1])
    stats = store.service.stats()
    assert (stats.held_slots, stats.used_slots) == (1, 1)
    store.end_hold(1)
    assert store.service.stats().leased_slots == 0


def test_what_other_stores_have_and_finds_no_room_is_told(stack: ExitStack) -> None:
    """A decode leg waits then: computed again would be what has been computed elsewhere."""
    store, tier = filled(stack, *PROMPTS[5])
    for hold in (1, 2, 3, 4):
        assert prefilled(store, hold, 1)
    tier.takes_stores = False
    while tier.stores:
        tier.end()
        store.turn()
    found = store.exchange(PROMPTS[5])
    assert (found.slots, found.num_unfetched) == ([], BLOCKS)
    assert store.lookup(*PROMPTS[5]) == [HIT] * BLOCKS
    store.end_hold(1)
    found = store.exchange(PROMPTS[5])
    assert (len(found.slots), found.num_unfetched) == (BLOCKS, 0)
    assert store.exchange([KEYS[30]]).num_unfetched == 0
    assert store.lookup(KEYS[30]) == [MISS]
