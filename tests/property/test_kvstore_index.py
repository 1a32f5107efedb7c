"""The index against a plain model that finds everything by looking at all of it."""

from __future__ import annotations

from dataclasses import dataclass, field

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from banaserve.kvstore.index import BlockIndex
from banaserve.kvstore.interface import Lookup

NUM_SLOTS = 3
KEYS = [bytes([ord("a") + i]) for i in range(5)]
OWNERS = [1, 2]

keys = st.sampled_from(KEYS)
owners = st.sampled_from(OWNERS)


@dataclass
class Block:
    parent: bytes | None
    slot: int
    serial: int
    owner: int
    num_parts: int
    ended: set[int] = field(default_factory=set)
    failed: bool = False
    ready: bool = False
    leases: int = 0
    last_used: int = 0


READY_BLOCK = Block(None, 0, 0, 0, 1, ready=True)


class IndexMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.index = BlockIndex(NUM_SLOTS)
        self.blocks: dict[bytes, Block] = {}
        self.leases: dict[int, tuple[int, list[bytes]]] = {}
        self.serials: list[int] = []
        self.tick = 0

    @rule(key=keys, parent=st.none() | keys, owner=owners, num_parts=st.integers(1, 2))
    def reserve(self, key: bytes, parent: bytes | None, owner: int, num_parts: int) -> None:
        reserved = self.index.reserve(key, parent, owner, num_parts)
        if key in self.blocks:
            assert reserved is None
            return
        if parent is not None and self.is_ancestor(key, parent):
            parent = None
        if len(self.blocks) == NUM_SLOTS:
            victims = [k for k in self.evictable() if k != parent]
            if not victims:
                assert reserved is None
                return
            del self.blocks[min(victims, key=self.age)]
        assert reserved is not None
        slot, serial = reserved
        assert slot not in {block.slot for block in self.blocks.values()}
        assert serial not in self.serials
        self.serials.append(serial)
        self.blocks[key] = Block(parent, slot, serial, owner, num_parts)

    # Most random sequences would never fill the index with readable chains. The next two rules
    # get there in few steps.
    @rule(key=keys, parent=st.none() | keys)
    def write(self, key: bytes, parent: bytes | None) -> None:
        self.reserve(key, parent, OWNERS[0], 1)
        if not self.blocks.get(key, READY_BLOCK).ready:
            for part in range(self.blocks[key].num_parts):
                self.end(self.blocks[key].serial, part, fails=False)

    @rule(key=keys)
    def use(self, key: bytes) -> None:
        self.acquire([key], OWNERS[0])
        for lease_id in [i for i, (_, held) in self.leases.items() if held == [key]]:
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
                del self.blocks[key]
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
            del self.blocks[key]

    @rule(asked=st.lists(keys, unique=True, max_size=5), owner=owners)
    def acquire(self, asked: list[bytes], owner: int) -> None:
        grant = self.index.acquire(asked, owner)
        prefix: list[bytes] = []
        for key in asked:
            if key not in self.blocks or not self.blocks[key].ready:
                break
            prefix.append(key)
        if not prefix:
            assert grant is None
            return
        assert grant is not None
        blocks = [self.blocks[key] for key in prefix]
        assert grant.slots == [(block.slot, block.serial) for block in blocks]
        self.tick += 1
        for block in blocks:
            block.leases += 1
            block.last_used = self.tick
        self.leases[grant.lease_id] = (owner, prefix)

    @precondition(lambda self: self.leases)
    @rule(data=st.data())
    def release_one(self, data: st.DataObject) -> None:
        self.release(data.draw(st.sampled_from(sorted(self.leases))))

    def release(self, lease_id: int) -> None:
        assert self.index.release(lease_id)
        assert not self.index.release(lease_id)
        self.forget_lease(lease_id)

    @rule(owner=owners)
    def drop_owner(self, owner: int) -> None:
        self.index.drop_owner(owner)
        for lease_id in [i for i, (holder, _) in self.leases.items() if holder == owner]:
            self.forget_lease(lease_id)
        for key, block in list(self.blocks.items()):
            if block.owner == owner and not block.ready:
                del self.blocks[key]

    @precondition(lambda self: len(self.blocks) == NUM_SLOTS)
    @rule()
    def clear(self) -> None:
        num_dropped = 0
        while victims := self.evictable():
            del self.blocks[victims[0]]
            num_dropped += 1
        assert self.index.clear() == num_dropped

    @invariant()
    def agrees(self) -> None:
        self.index.check()
        states = dict.fromkeys(KEYS, Lookup.MISS)
        for key, block in self.blocks.items():
            states[key] = Lookup.HIT if block.ready else Lookup.PENDING
        assert self.index.lookup(KEYS) == list(states.values())
        assert self.index.num_used == len(self.blocks)
        assert self.index.num_leases == len(self.leases)
        assert self.index.num_leased == sum(block.leases > 0 for block in self.blocks.values())

    def age(self, key: bytes) -> tuple[int, int]:
        return self.blocks[key].last_used, self.blocks[key].serial

    def evictable(self) -> list[bytes]:
        parents = {block.parent for block in self.blocks.values()}
        return [
            key
            for key, block in self.blocks.items()
            if block.ready and not block.leases and key not in parents
        ]

    def is_ancestor(self, key: bytes, of: bytes | None) -> bool:
        while of is not None and of != key:
            of = self.blocks[of].parent if of in self.blocks else None
        return of is not None

    def writing(self, serial: int) -> bytes | None:
        for key, block in self.blocks.items():
            if block.serial == serial and not block.ready:
                return key
        return None

    def forget_lease(self, lease_id: int) -> None:
        for key in self.leases.pop(lease_id)[1]:
            self.blocks[key].leases -= 1


IndexMachine.TestCase.settings = settings(
    max_examples=300, stateful_step_count=30, deadline=None, derandomize=True
)
TestIndex = IndexMachine.TestCase
