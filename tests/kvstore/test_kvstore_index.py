"""The index by tables of cases; ``test_kvstore_index_property.py`` has a plain model beside it."""

from __future__ import annotations

import pytest

from banaserve.kvstore.index.index import BlockIndex
from banaserve.kvstore.index.records import IndexEntry
from banaserve.kvstore.index.seen_keys import SeenKeys
from banaserve.kvstore.leases import Lookup
from index_invariants import check_index

ALICE, BOB = 1, 2


def store(index: BlockIndex, *chain: bytes, owner: int = ALICE) -> None:
    """Write a chain of blocks, each the parent of the next."""
    parent = None
    for key in chain:
        reserved = index.reserve(key, parent, owner)
        assert reserved is not None
        assert index.commit(reserved[1], 0)
        parent = key
    check_index(index)


def present(index: BlockIndex, keys: bytes) -> str:
    """The keys, each a letter, that are READY."""
    found = index.lookup([bytes([key]) for key in keys])
    return "".join(chr(key) for key, state in zip(keys, found, strict=True) if state is Lookup.HIT)


def test_a_block_is_pending_between_reserve_and_commit() -> None:
    index = BlockIndex(2)
    assert index.lookup([b"a"]) == [Lookup.MISS]
    reserved = index.reserve(b"a", None, ALICE)
    assert reserved is not None
    assert index.lookup([b"a"]) == [Lookup.PENDING]
    assert index.acquire([b"a"], BOB) is None
    assert index.commit(reserved[1], 0)
    assert index.lookup([b"a"]) == [Lookup.HIT]
    check_index(index)


@pytest.mark.parametrize(
    ("asked", "num_granted"), [(b"abc", 3), (b"abx", 2), (b"axc", 1), (b"xbc", 0), (b"", 0)]
)
def test_acquire_leases_the_longest_readable_prefix(asked: bytes, num_granted: int) -> None:
    index = BlockIndex(4)
    store(index, b"a", b"b", b"c")
    grant = index.acquire([bytes([key]) for key in asked], ALICE)
    assert (0 if grant is None else len(grant.slots)) == num_granted
    assert index.num_leased == num_granted
    assert index.counters.hits == num_granted
    assert index.counters.misses == len(asked) - num_granted
    check_index(index)


def test_a_key_is_reserved_once() -> None:
    index = BlockIndex(4)
    assert index.reserve(b"a", None, ALICE) is not None
    assert index.reserve(b"a", None, BOB) is None
    store(index, b"b")
    assert index.reserve(b"b", None, BOB) is None


def test_the_least_recently_used_block_goes_first() -> None:
    index = BlockIndex(3)
    for key in (b"a", b"b", b"c"):
        store(index, key)
    grant = index.acquire([b"a"], ALICE)
    assert grant is not None
    index.release(grant.lease_id)
    store(index, b"d")
    assert present(index, b"abcd") == "acd"
    assert index.counters.evictions == 1


def test_a_leased_block_is_never_evicted() -> None:
    index = BlockIndex(2)
    store(index, b"a")
    store(index, b"b")
    grant = index.acquire([b"a", b"b"], ALICE)
    assert grant is not None
    assert index.reserve(b"c", None, BOB) is None
    index.release(grant.lease_id)
    assert index.reserve(b"c", None, BOB) is not None
    check_index(index)


def test_a_block_is_evicted_only_after_its_descendants() -> None:
    index = BlockIndex(3)
    store(index, b"a", b"b", b"c")
    for new, expected in ((b"x", "abx"), (b"y", "axy"), (b"z", "xyz")):
        store(index, new)
        assert present(index, b"abcxyz") == expected


def test_a_new_block_never_takes_its_parents_slot() -> None:
    index = BlockIndex(1)
    store(index, b"a")
    assert index.reserve(b"b", b"a", ALICE) is None
    assert present(index, b"a") == "a"
    check_index(index)


def test_a_parent_that_comes_back_is_kept_for_its_child() -> None:
    index = BlockIndex(2)
    reserved = index.reserve(b"child", b"p", ALICE)
    assert reserved is not None
    index.commit(reserved[1], 0)
    store(index, b"p")
    store(index, b"x")
    assert index.lookup([b"p", b"child"]) == [Lookup.HIT, Lookup.MISS]


@pytest.mark.parametrize("links", [[(b"a", b"a")], [(b"a", b"b"), (b"b", b"a")]])
def test_cyclic_parents_can_still_be_evicted(links: list[tuple[bytes, bytes]]) -> None:
    index = BlockIndex(len(links))
    for key, parent in links:
        reserved = index.reserve(key, parent, ALICE)
        assert reserved is not None
        index.commit(reserved[1], 0)
    assert index.clear() == len(links)
    check_index(index)


@pytest.mark.parametrize(
    ("ends", "results", "state"),
    [
        ("c0 c1", [True, True], Lookup.HIT),
        ("c1 c0", [True, True], Lookup.HIT),
        ("c0", [True], Lookup.PENDING),
        ("c0 c0", [True, False], Lookup.PENDING),
        ("c2", [False], Lookup.PENDING),
        ("c0 a1", [True, True], Lookup.MISS),
        ("a0", [True], Lookup.PENDING),
        ("a0 c1", [True, True], Lookup.MISS),
        ("c0 c1 c1", [True, True, False], Lookup.HIT),
    ],
)
def test_a_block_of_two_parts(ends: str, results: list[bool], state: Lookup) -> None:
    index = BlockIndex(1)
    reserved = index.reserve(b"k", None, ALICE, num_parts=2)
    assert reserved is not None
    serial = reserved[1]
    acts = {"c": index.commit, "a": index.abandon}
    assert [acts[end[0]](serial, int(end[1])) for end in ends.split()] == results
    assert index.lookup([b"k"]) == [state]
    check_index(index)


def test_a_late_commit_cannot_publish_the_next_use_of_the_slot() -> None:
    index = BlockIndex(1)
    first = index.reserve(b"a", None, ALICE)
    assert first is not None
    assert index.abandon(first[1])
    second = index.reserve(b"b", None, BOB)
    assert second is not None
    assert second[0] == first[0]
    assert not index.commit(first[1], 0)
    assert not index.abandon(first[1])
    assert index.lookup([b"b"]) == [Lookup.PENDING]


def test_everything_ends_with_its_owner_and_nothing_else() -> None:
    index = BlockIndex(4)
    store(index, b"a")
    alices, bobs = index.acquire([b"a"], ALICE), index.acquire([b"a"], BOB)
    assert alices is not None
    assert bobs is not None
    index.reserve(b"b", b"a", ALICE)
    index.reserve(b"c", b"a", BOB)
    index.drop_owner(ALICE)
    check_index(index)
    assert not index.owns_any(ALICE)
    assert not index.release(alices.lease_id)
    assert index.num_leased == 1
    assert index.lookup([b"b", b"c"]) == [Lookup.MISS, Lookup.PENDING]
    index.drop_owner(BOB)
    assert (index.num_leased, index.stats().writing_slots, index.has_owners) == (0, 0, False)


def test_clear_keeps_what_is_in_use_and_its_ancestors() -> None:
    index = BlockIndex(8)
    store(index, b"a", b"b", b"c")
    store(index, b"x", b"y")
    grant = index.acquire([b"x"], ALICE)
    assert grant is not None
    index.reserve(b"n", b"a", ALICE)
    assert index.clear() == 3
    assert present(index, b"abcxy") == "ax"
    assert index.counters.evictions == 0
    check_index(index)


def fill(index: BlockIndex, tenant: bytes, *keys: bytes) -> int:
    """Write blocks without parents; how many got a slot."""
    num_written = 0
    for key in keys:
        reserved = index.reserve(key, None, ALICE, tenant=tenant)
        if reserved is not None:
            assert index.commit(reserved[1], 0)
            num_written += 1
    check_index(index)
    return num_written


def test_a_tenant_over_its_quota_evicts_its_own_blocks() -> None:
    index = BlockIndex(6, tenant_quota=0.5)
    fill(index, b"older", b"a", b"b")
    assert fill(index, b"newer", b"t", b"u", b"v", b"w") == 4
    assert present(index, b"abtuvw") == "abuvw"
    counters = index.counters
    assert (counters.evictions, counters.quota_evictions, index.stats().num_tenants) == (1, 1, 2)


def test_a_tenant_below_its_quota_takes_the_block_used_longest_ago() -> None:
    index = BlockIndex(4, tenant_quota=0.75)
    fill(index, b"first", b"a", b"b", b"c")
    assert fill(index, b"second", b"t", b"u") == 2
    assert present(index, b"abctu") == "bctu"
    assert index.counters.quota_evictions == 0


def test_a_tenant_whose_slots_are_all_in_use_is_refused() -> None:
    index = BlockIndex(4, tenant_quota=0.5)
    fill(index, b"t", b"a", b"b")
    grant = index.acquire([b"a", b"b"], BOB)
    assert grant is not None
    assert index.reserve(b"c", None, ALICE, tenant=b"t") is None
    assert index.promote(b"c", None, b"t") is None
    assert index.counters.quota_refusals == 2
    assert fill(index, b"other", b"c") == 1


def test_a_tenant_without_slots_is_forgotten() -> None:
    index = BlockIndex(2, tenant_quota=0.5)
    for number in range(100):
        fill(index, b"tenant %d" % number, b"%d" % number)
    assert index.stats().num_tenants == 2
    index.clear()
    assert index.stats().num_tenants == 0
    check_index(index)


def test_a_quota_of_many_evictions_keeps_the_queues_small() -> None:
    index = BlockIndex(8, tenant_quota=0.5)
    for number in range(2000):
        fill(index, b"t", number.to_bytes(2, "big"))
    assert len(index._queue._heap) < 200


class Freed:
    """Watches which slots become free."""

    def __init__(self) -> None:
        self.slots: list[int] = []

    def became_free(self, entry: IndexEntry) -> None:
        self.slots.append(entry.slot)

    def became_ready(self, entry: IndexEntry) -> None: ...
    def became_pending(self, entry: IndexEntry) -> None: ...
    def failed(self, entry: IndexEntry) -> None: ...


def test_freed_slots_are_reported_once() -> None:
    freed = Freed()
    index = BlockIndex(2, freed)
    store(index, b"a")
    store(index, b"b")
    store(index, b"c")
    assert freed.slots == [0]
    index.clear()
    assert sorted(freed.slots) == [0, 0, 1]


# ---- blocks that requests ask to keep


def chained(index: BlockIndex, tenant: bytes, *keys: bytes) -> None:
    """Write a chain of blocks."""
    for key, parent in zip(keys, (None, *keys), strict=False):
        reserved = index.reserve(key, parent, ALICE, tenant=tenant)
        assert reserved is not None
        assert index.commit(reserved[1], 0)
    check_index(index)


def test_what_is_kept_outlives_a_load_that_evicts_all_else() -> None:
    index = BlockIndex(8, kept_quota=0.5)
    chained(index, b"", b"a", b"b", b"c")
    index.keep([b"a", b"b", b"c", b"not there"], until_s=60.0)
    for number in range(100):
        assert fill(index, b"", b"%d" % number) == 1
    assert present(index, b"abc") == "abc"
    index.expire(59.9)
    fill(index, b"", *(b"x%d" % number for number in range(8)))
    assert present(index, b"abc") == "abc"
    index.expire(60.0)
    fill(index, b"", *(b"y%d" % number for number in range(8)))
    assert present(index, b"abc") == ""
    assert index.counters.kept_given_way == 0


def test_a_chain_that_is_too_long_is_kept_from_its_start_on() -> None:
    index = BlockIndex(8, kept_quota=0.25)
    chained(index, b"", b"a", b"b", b"c", b"d")
    index.keep([b"a", b"b", b"c", b"d"], until_s=60.0)
    fill(index, b"", *(b"%d" % number for number in range(8)))
    assert present(index, b"abcd") == "ab"
    assert (index.stats().kept_slots, index.counters.kept_given_way) == (2, 2)


def test_the_oldest_gives_way_in_its_tenant_s_part_and_in_all() -> None:
    index = BlockIndex(16, tenant_quota=0.5, kept_quota=0.5)
    for tenant, keys in ((b"t", b"ab"), (b"t", b"cde"), (b"u", b"f"), (b"v", b"ghi")):
        chain = [bytes([key]) for key in keys]
        chained(index, tenant, *chain)
        index.keep(chain, until_s=60.0)
        check_index(index)
    # Tenant t may keep four, all tenants eight.
    kept = [chr(key) for key in b"abcdefghi" if (e := index.get(bytes([key]))) and e.kept_until_s]
    assert "".join(kept) == "acdefghi"
    chained(index, b"w", b"j")
    index.keep([b"j"], until_s=60.0)
    assert (index.stats().kept_slots, index.counters.kept_given_way) == (8, 2)
    assert index.get(b"a").kept_until_s == 0  # type: ignore[union-attr]


def test_what_is_kept_blocks_no_writer() -> None:
    index = BlockIndex(4, kept_quota=1.0)
    chained(index, b"", b"a", b"b", b"c", b"d")
    index.keep([b"a", b"b", b"c", b"d"], until_s=60.0)
    assert all(index.reserve(key, None, BOB) for key in (b"w", b"x", b"y", b"z"))
    check_index(index)
    assert index.counters.kept_given_way == 4


def test_keeping_longer_counts_and_keeping_shorter_does_not() -> None:
    index = BlockIndex(4, kept_quota=1.0)
    chained(index, b"", b"a")
    for until_s in (30.0, 60.0, 10.0):
        index.keep([b"a"], until_s)
    index.expire(59.0)
    assert index.stats().kept_slots == 1
    index.expire(60.0)
    assert index.stats().kept_slots == 0


def test_clearing_drops_what_is_kept() -> None:
    index = BlockIndex(4, kept_quota=1.0)
    chained(index, b"", b"a", b"b")
    index.keep([b"a", b"b"], until_s=60.0)
    assert (index.clear(), index.stats().kept_slots) == (2, 0)


# ---- beside an unlimited store


def test_a_block_that_was_never_seen_is_new_once() -> None:
    index = BlockIndex(2)
    index.count_asked([b"a", b"b"], 0)
    assert (index.counters.asked_blocks, index.counters.found_blocks) == (2, 0)
    assert index.counters.new_blocks == pytest.approx(2.0, abs=0.01)
    fill(index, b"", b"a", b"b", b"c", b"d")
    index.count_asked([b"a", b"b"], 0)  # evicted: an unlimited store would have them
    index.count_asked([b"d"], 1)
    index.count_asked([b"c", b"e"], 1)
    assert (index.counters.asked_blocks, index.counters.found_blocks) == (7, 2)
    assert index.counters.new_blocks == pytest.approx(3.0, abs=0.01)


def test_a_block_that_another_request_writes_is_not_counted() -> None:
    index = BlockIndex(2)
    assert index.reserve(b"a", None, ALICE)
    index.count_asked([b"a", b"b"], 0)
    assert (index.counters.asked_blocks, index.counters.found_blocks) == (1, 0)


def test_the_number_of_different_keys_is_known_within_a_few_percent() -> None:
    """Within five standard errors, of 0.9% each; what was added before never counts."""
    seen, total = SeenKeys(), 0.0
    for number in range(1_000_000):
        total += seen.add(number.to_bytes(32, "big"))
        if number + 1 in (1000, 30_000, 1_000_000):
            assert total == pytest.approx(number + 1, rel=5 * 0.0092)
    assert sum(seen.add(number.to_bytes(32, "big")) for number in range(1000)) == 0.0
