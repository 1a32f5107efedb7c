"""The index against a plain model that finds everything by looking at all of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from banaserve.kvstore.index.index import BlockIndex
from banaserve.kvstore.index.records import IndexEntry
from banaserve.kvstore.leases import Lookup
from depth import num_examples
from index_invariants import check_index

NUM_SLOTS = 3
KEPT_QUOTA = 0.67
KEYS = [bytes([ord("a") + i]) for i in range(5)]
OWNERS = [1, 2]
TENANTS = [b"", b"t"]
HOLDS = [1, 2]

keys = st.sampled_from(KEYS)
owners = st.sampled_from(OWNERS)
tenants = st.sampled_from(TENANTS)
MISSES = dict.fromkeys(KEYS, Lookup.MISS)


@dataclass
class Block:
    parent: bytes | None
    slot: int
    serial: int
    tenant: bytes
    owner: int = 0
    num_parts: int = 1
    ended: set[int] = field(default_factory=set)
    failed: bool = False
    ready: bool = False
    promoting: bool = False
    leases: int = 0
    pins: int = 0
    last_used: int = 0
    kept_until_s: int = 0


READY_BLOCK = Block(None, 0, 0, b"", ready=True)


class Board:
    """What clients are told of each slot: (state, serial)."""

    def __init__(self) -> None:
        self.words: dict[int, tuple[str, int]] = {}

    def became_pending(self, entry: IndexEntry) -> None:
        self.words[entry.slot] = ("pending", entry.serial)

    def became_ready(self, entry: IndexEntry) -> None:
        self.words[entry.slot] = ("ready", entry.serial)

    def failed(self, entry: IndexEntry) -> None:
        self.words[entry.slot] = ("failed", entry.serial)

    def became_free(self, entry: IndexEntry) -> None:
        self.words.pop(entry.slot, None)


class IndexMachine(RuleBasedStateMachine):
    """Blocks by key, and blocks that were dropped while somebody uses their slot."""

    quota_slots = NUM_SLOTS

    def __init__(self) -> None:
        super().__init__()
        self.board = Board()
        quota = self.quota_slots / NUM_SLOTS
        self.corrupt: set[int] = set()
        self.index = BlockIndex(NUM_SLOTS, self.board, None, quota, self.is_intact, KEPT_QUOTA)
        self.blocks: dict[bytes, Block] = {}
        self.dropped: list[Block] = []
        self.leases: dict[int, tuple[int, list[Block]]] = {}
        self.holds: dict[int, list[Block]] = {}
        self.readers: dict[int, set[int]] = {}
        self.held_until_s: dict[int, int] = {}
        self.serials: list[int] = []
        self.pinned: list[IndexEntry] = []
        self.promotions: dict[int, IndexEntry] = {}
        self.tick = 0
        self.kept: list[Block] = []
        self.now_s = 1

    def is_intact(self, entry: IndexEntry) -> bool:
        return entry.serial not in self.corrupt

    @rule(
        key=keys, parent=st.none() | keys, owner=owners, num_parts=st.integers(1, 2), tenant=tenants
    )
    def reserve(
        self, key: bytes, parent: bytes | None, owner: int, num_parts: int, tenant: bytes
    ) -> None:
        reserved = self.index.reserve(key, parent, owner, num_parts, tenant)
        block = self.place(key, parent, tenant, reserved)
        if block is not None:
            block.owner, block.num_parts = owner, num_parts

    @rule(key=keys, parent=st.none() | keys, tenant=tenants)
    def promote(self, key: bytes, parent: bytes | None, tenant: bytes) -> None:
        entry = self.index.promote(key, parent, tenant)
        placed = None if entry is None else (entry.slot, entry.serial)
        block = self.place(key, parent, tenant, placed)
        if block is not None and entry is not None:
            block.promoting, block.pins, block.last_used = True, 1, self.tick
            self.promotions[entry.serial] = entry

    @precondition(lambda self: self.promotions)
    @rule(data=st.data(), filled=st.booleans())
    def end_promotion(self, data: st.DataObject, filled: bool) -> None:
        serial = data.draw(st.sampled_from(sorted(self.promotions)))
        self.index.end_promotion(self.promotions.pop(serial), filled=filled)
        key = self.key_of(serial)
        if key is not None and filled:
            block = self.blocks[key]
            self.tick += 1
            block.promoting, block.ready, block.last_used = False, True, self.tick
        elif key is not None:
            self.drop_block(key)
        self.unpin_block(serial)

    @rule(key=keys)
    def pin(self, key: bytes) -> None:
        entry = self.index.get(key)
        if entry is not None and entry.ready:
            self.index.pin(entry)
            self.blocks[key].pins += 1
            self.pinned.append(entry)

    @precondition(lambda self: self.pinned)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        entry = self.pinned.pop(data.draw(st.integers(0, len(self.pinned) - 1)))
        self.index.unpin(entry)
        self.unpin_block(entry.serial)

    @rule(key=keys)
    def drop(self, key: bytes) -> None:
        entry = self.index.get(key)
        if entry is not None and (entry.ready or entry.promoting):
            self.index.drop(entry)
            self.drop_block(key)

    @rule(key=keys)
    def corrupt_memory(self, key: bytes) -> None:
        if key in self.blocks and self.blocks[key].ready:
            self.corrupt.add(self.blocks[key].serial)

    def place(
        self, key: bytes, parent: bytes | None, tenant: bytes, placed: tuple[int, int] | None
    ) -> Block | None:
        """What ``reserve`` and ``promote`` have in common."""
        if key in self.blocks:
            assert placed is None
            return None
        if parent is not None and self.is_ancestor(key, parent):
            parent = None
        in_use = [*self.blocks.values(), *self.dropped]
        is_over = sum(block.tenant == tenant for block in in_use) >= self.quota_slots
        if is_over or len(in_use) == NUM_SLOTS:
            payer = tenant if is_over and self.quota_slots < NUM_SLOTS else None
            while not (victims := self.victims(parent, payer)) and self.give_way(payer):
                pass
            if not victims:
                assert placed is None
                return None
            del self.blocks[min(victims, key=self.age)]
        assert placed is not None
        slot, serial = placed
        assert slot not in {block.slot for block in [*self.blocks.values(), *self.dropped]}
        assert serial not in self.serials
        self.serials.append(serial)
        self.blocks[key] = Block(parent, slot, serial, tenant)
        return self.blocks[key]

    def victims(self, parent: bytes | None, payer: bytes | None) -> list[bytes]:
        """Blocks that may go for a child of ``parent``, of ``payer`` only where one is given."""
        found = [key for key in self.evictable() if key != parent]
        return [key for key in found if payer in (None, self.blocks[key].tenant)]

    def give_way(self, payer: bytes | None) -> bool:
        """Keep the block no longer that was kept first, of ``payer`` where one is given."""
        kept = [block for block in self.kept if payer in (None, block.tenant)]
        if kept:
            self.keep_no_longer(kept[0])
        return bool(kept)

    def keep_no_longer(self, block: Block) -> None:
        self.kept = [one for one in self.kept if one is not block]
        block.kept_until_s = 0

    @rule(wanted=st.lists(keys, min_size=1, max_size=4, unique=True), keep_s=st.integers(1, 3))
    def keep(self, wanted: list[bytes], keep_s: int) -> None:
        self.index.keep(wanted, self.now_s + keep_s)
        given = [self.blocks[key] for key in wanted if key in self.blocks]
        for block in reversed(given):
            until_s = max(block.kept_until_s, self.now_s + keep_s)
            self.keep_no_longer(block)
            self.kept.append(block)
            block.kept_until_s = until_s
        for tenant in TENANTS:
            while self.num_kept(tenant) > int(KEPT_QUOTA * self.quota_slots):
                self.give_way(tenant)
        while len(self.kept) > int(KEPT_QUOTA * NUM_SLOTS):
            self.give_way(None)

    def num_kept(self, tenant: bytes) -> int:
        return sum(block.tenant == tenant for block in self.kept)

    @rule()
    def expire(self) -> None:
        self.now_s += 1
        self.index.expire(self.now_s)
        for block in [one for one in self.kept if one.kept_until_s <= self.now_s]:
            self.keep_no_longer(block)
        for hold in [one for one in self.holds if self.held_until_s[one] <= self.now_s]:
            self.forget_hold(hold)

    def drop_block(self, key: bytes) -> None:
        block = self.blocks[key]
        self.forget_unwritten(key)
        block.ready = block.promoting = False
        self.dropped.append(block)
        self.settle()

    def unpin_block(self, serial: int) -> None:
        for block in [*self.blocks.values(), *self.dropped]:
            if block.serial == serial:
                block.pins -= 1
        self.settle()

    def settle(self) -> None:
        self.dropped = [block for block in self.dropped if block.leases or block.pins]

    def key_of(self, serial: int) -> bytes | None:
        return next((k for k, block in self.blocks.items() if block.serial == serial), None)

    # Most random sequences would never fill the index with readable chains. The next two rules
    # get there in few steps.
    @rule(key=keys, parent=st.none() | keys, tenant=tenants)
    def write(self, key: bytes, parent: bytes | None, tenant: bytes) -> None:
        self.reserve(key, parent, OWNERS[0], 1, tenant)
        block = self.blocks.get(key, READY_BLOCK)
        if not block.ready and not block.promoting:
            for part in range(self.blocks[key].num_parts):
                self.end(self.blocks[key].serial, part, fails=False)

    @rule(key=keys)
    def use(self, key: bytes) -> None:
        self.acquire([key], OWNERS[0])
        held = [self.blocks[key]] if key in self.blocks else []
        for lease_id in [i for i, (_, blocks) in self.leases.items() if blocks == held]:
            self.release(lease_id)

    @precondition(lambda self: self.serials)
    @rule(data=st.data(), part=st.integers(0, 2), fails=st.booleans())
    def end_part(self, data: st.DataObject, part: int, fails: bool) -> None:
        self.end(data.draw(st.sampled_from(self.serials)), part, fails=fails)

    def end(self, serial: int, part: int, *, fails: bool) -> None:
        end = self.index.abandon if fails else self.index.commit
        accepted = end(serial, part)
        key = self.writing(serial)
        if key is None or part >= self.blocks[key].num_parts or part in self.blocks[key].ended:
            assert not accepted
            return
        assert accepted
        block = self.blocks[key]
        block.ended.add(part)
        block.failed |= fails
        if len(block.ended) == block.num_parts:
            if block.failed:
                self.forget_unwritten(key)
            else:
                self.tick += 1
                block.ready, block.last_used = True, self.tick

    @precondition(lambda self: self.serials)
    @rule(data=st.data())
    def abandon(self, data: st.DataObject) -> None:
        serial = data.draw(st.sampled_from(self.serials))
        key = self.writing(serial)
        assert self.index.abandon(serial) is (key is not None)
        if key is not None:
            self.forget_unwritten(key)

    def forget_unwritten(self, key: bytes) -> None:
        gone = self.blocks.pop(key)
        self.keep_no_longer(gone)
        for hold, held in self.holds.items():
            gone.leases -= sum(block is gone for block in held)
            self.holds[hold] = [block for block in held if block is not gone]

    @rule(asked=st.lists(keys, unique=True, max_size=5), owner=owners)
    def acquire(self, asked: list[bytes], owner: int) -> None:
        counters = self.index.counters
        hits, misses = counters.hits, counters.misses
        grant = self.index.acquire(asked, owner)
        blocks = self.prefix(asked)
        num_ready = sum(block.ready for block in blocks)
        assert counters.hits - hits == num_ready
        assert counters.misses - misses == len(asked) - num_ready
        if not blocks:
            assert grant is None
            return
        assert grant is not None
        assert grant.slots == [(block.slot, block.serial) for block in blocks]
        assert all(block.ready for block in blocks[: grant.num_ready])
        assert not any(block.ready for block in blocks[grant.num_ready : grant.num_ready + 1])
        self.tick += 1
        for block in blocks:
            block.leases += 1
            block.last_used = self.tick
        self.leases[grant.lease_id] = (owner, blocks)

    @precondition(lambda self: self.leases)
    @rule(data=st.data(), asked=st.lists(keys, unique=True, max_size=3))
    def extend(self, data: st.DataObject, asked: list[bytes]) -> None:
        lease_id = data.draw(st.sampled_from(sorted(self.leases)))
        self.index.extend(self.index._leases[lease_id], self.index.find(asked))
        for block in self.prefix(asked):
            block.leases += 1
            block.last_used = self.tick
            self.leases[lease_id][1].append(block)

    def prefix(self, asked: Sequence[bytes]) -> list[Block]:
        """The blocks that a lease covers; the first corrupt one is dropped and ends it."""
        blocks: list[Block] = []
        for key in asked:
            block = self.blocks.get(key)
            if block is None or not (block.ready or block.promoting):
                break
            if block.ready and block.serial in self.corrupt:
                self.drop_block(key)
                break
            blocks.append(block)
        return blocks

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release_one(self, data: st.DataObject) -> None:
        self.release(data.draw(st.sampled_from(sorted(self.leases))))

    def release(self, lease_id: int) -> None:
        assert self.index.release(lease_id)
        assert not self.index.release(lease_id)
        self.forget_lease(lease_id)

    @rule(hold=st.sampled_from(HOLDS), wanted=st.lists(keys, min_size=1, max_size=4))
    def hold(self, hold: int, wanted: list[bytes]) -> None:
        self.held_until_s[hold] = self.now_s + hold
        self.index.hold(hold, wanted, self.held_until_s[hold], num_readers=hold)
        self.readers.setdefault(hold, set())
        held = self.holds.setdefault(hold, [])
        for key in wanted:
            block = self.blocks.get(key)
            if block is not None and not any(block is one for one in held):
                block.leases += 1
                held.append(block)

    @rule(hold=st.sampled_from(HOLDS), reader=st.sampled_from([None, 0, 1]))
    def end_hold(self, hold: int, reader: int | None) -> None:
        """A hold has as many readers as its number says."""
        assert self.index.end_hold(hold, reader) == (hold in self.holds)
        have_read = self.readers.get(hold, set())
        have_read |= set() if reader is None else {reader}
        if reader is None or len(have_read) >= hold:
            self.forget_hold(hold)

    def forget_hold(self, hold: int) -> None:
        self.readers.pop(hold, None)
        for block in self.holds.pop(hold, []):
            block.leases -= 1
        self.settle()

    @rule(owner=owners)
    def drop_owner(self, owner: int) -> None:
        self.index.drop_owner(owner)
        for lease_id in [i for i, (holder, _) in self.leases.items() if holder == owner]:
            self.forget_lease(lease_id)
        for key, block in list(self.blocks.items()):
            if block.owner == owner and not block.ready and not block.promoting:
                self.forget_unwritten(key)

    @precondition(lambda self: len(self.blocks) == NUM_SLOTS)
    @rule()
    def clear(self) -> None:
        for block in self.kept:
            self.keep_no_longer(block)
        num_dropped = 0
        while victims := self.evictable():
            del self.blocks[victims[0]]
            num_dropped += 1
        assert self.index.clear() == num_dropped

    @invariant()
    def agrees(self) -> None:
        check_index(self.index)
        states = dict(MISSES)
        for key, block in self.blocks.items():
            states[key] = Lookup.HIT if block.ready else Lookup.PENDING
        assert self.index.lookup(KEYS) == list(states.values())
        in_use = [*self.blocks.values(), *self.dropped]
        assert self.index.stats().used_slots == len(in_use)
        assert self.index.num_promoting == sum(block.promoting for block in in_use)
        assert self.index.stats().num_tenants == len({block.tenant for block in in_use})
        assert self.index.stats().num_leases == len(self.leases)
        assert self.index.stats().num_holds == len(self.holds)
        held = {block.serial for blocks in self.holds.values() for block in blocks}
        assert self.index.num_held == len(held)
        assert self.index.stats().kept_slots == len(self.kept)
        assert self.index.num_leased == sum(block.leases > 0 for block in in_use)
        words = {block.slot: ("failed", block.serial) for block in self.dropped}
        for block in self.blocks.values():
            if block.ready or block.promoting:
                words[block.slot] = ("ready" if block.ready else "pending", block.serial)
        assert self.board.words == words

    def age(self, key: bytes) -> tuple[int, int]:
        return self.blocks[key].last_used, self.blocks[key].serial

    def evictable(self) -> list[bytes]:
        parents = {block.parent for block in self.blocks.values()}
        return [
            key
            for key, block in self.blocks.items()
            if block.ready and key not in parents
            if not (block.leases or block.pins or block.kept_until_s)
        ]

    def is_ancestor(self, key: bytes, of: bytes | None) -> bool:
        while of is not None and of != key:
            of = self.blocks[of].parent if of in self.blocks else None
        return of is not None

    def writing(self, serial: int) -> bytes | None:
        for key, block in self.blocks.items():
            if block.serial == serial and not block.ready and not block.promoting:
                return key
        return None

    def forget_lease(self, lease_id: int) -> None:
        for block in self.leases.pop(lease_id)[1]:
            block.leases -= 1
        self.settle()


class QuotaMachine(IndexMachine):
    """The same with tenants that may use two of the three slots each."""

    quota_slots = 2


seeded = settings(max_examples=num_examples(200), stateful_step_count=30)
IndexMachine.TestCase.settings = seeded
QuotaMachine.TestCase.settings = seeded
TestIndex = IndexMachine.TestCase
TestIndexWithQuotas = QuotaMachine.TestCase
