"""A tier that ends its work when told, and the store's service over such tiers in virtual time."""

from __future__ import annotations

import os
import selectors
from collections.abc import Sequence
from contextlib import ExitStack

import numpy as np

from banaserve.kvstore import wire
from banaserve.kvstore.daemon.carved_pool import CarvedPool
from banaserve.kvstore.daemon.pushes.pushing import Pushing
from banaserve.kvstore.daemon.service import StoreService
from banaserve.kvstore.daemon.tiering.attached_tier import AttachedTier
from banaserve.kvstore.daemon.tiering.tiering import Tiering
from banaserve.kvstore.fingerprint import PAGE_BYTES
from banaserve.kvstore.leases import Lookup, Slot
from banaserve.kvstore.pool import Board, BoardView, SlotPool
from banaserve.kvstore.stats import TierReport
from banaserve.kvstore.tiers.interface import (
    BlockBytes,
    BlockName,
    Completion,
    TierOutcome,
    TierStats,
)
from fingerprints import FINGERPRINT
from index_invariants import check_index

NUM_SLOTS = 8
KEYS = [bytes([number + 1]) * 32 for number in range(32)]
NAMESPACE = FINGERPRINT.namespace()
ASKED, HIT, MISS, PENDING = Lookup.ASKED, Lookup.HIT, Lookup.MISS, Lookup.PENDING


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

    def end(self, outcome: TierOutcome = TierOutcome.DONE, *, only: str = "") -> None:
        """Carry out what is under way; of a load that fails half is written."""
        loads = {} if only == "store" else self.loads
        for ticket, (key, target) in list(loads.items()):
            data = np.frombuffer(self.blocks[key], np.uint8)
            part = target.size if outcome is TierOutcome.DONE else target.size // 2
            target[:part] = data[:part]
            del self.loads[ticket]
            self.ended.append(Completion(ticket, outcome))
            if outcome in (TierOutcome.MISSING, TierOutcome.CORRUPT):
                self.blocks.pop(key, None)
        stores = {} if only == "load" else self.stores
        for ticket, (block, source) in list(stores.items()):
            if outcome is TierOutcome.DONE:
                self.blocks[block.key] = source.tobytes()
                self.parents[block.key] = block.parent
            del self.stores[ticket]
            self.ended.append(Completion(ticket, outcome))
        os.eventfd_write(self.fd, 1)

    def poll(self) -> list[Completion]:
        self.maybe_raise()
        os.eventfd_read(self.fd)
        ended, self.ended = self.ended, []
        return ended

    def clear(self) -> int:
        read = {key for key, _ in self.loads.values()}
        gone = self.blocks.keys() - read
        for key in gone:
            del self.blocks[key]
        return len(gone)

    def stats(self) -> TierStats:
        return TierStats(
            name=self.name,
            num_blocks=len(self.blocks),
            in_flight=len(self.loads) + len(self.stores),
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
        self,
        stack: ExitStack,
        *tiers: ScriptedTier,
        quota: float = 1.0,
        verifies: bool = False,
        num_slots: int = NUM_SLOTS,
    ) -> None:
        self.now_s = 100.0
        self.pool = SlotPool(num_slots * PAGE_BYTES)
        self.board = Board(self.pool.num_bytes)
        self.selector = selectors.DefaultSelector()
        attached = [AttachedTier(tier.name, tier) for tier in tiers]
        carved = CarvedPool(
            self.pool, self.board, tenant_quota=quota, poisons=True, verifies=verifies
        )
        self.tiering = Tiering(attached, carved, self.selector, lambda: self.now_s)
        pushing = Pushing(b"", self.selector, carved)
        self.service = StoreService(
            carved, self.tiering, pushing, lambda _: None, lambda: self.now_s
        )
        for close in (self.selector.close, self.board.close, self.pool.close):
            stack.callback(close)
        stack.callback(self.tiering.close, 5.0)
        stack.callback(pushing.close)
        hello = wire.ClientHello(1, wire.PROTOCOL_VERSION, "here", FINGERPRINT)
        welcome = self.service.greet(1, hello)
        assert isinstance(welcome, wire.Welcome)
        self.generation = welcome.generation
        self.view = BoardView(self.board.fd, self.pool.num_bytes, self.generation)

    def turn(self, timeout_s: float = 0.0) -> None:
        """What the daemon's loop does once."""
        for key, events in self.selector.select(timeout_s):
            key.data(events)
        self.tiering.pump()
        check_index(self.service.index)

    def exchange(
        self,
        acquire: Sequence[bytes] = (),
        reserve: Sequence[tuple[bytes, bytes | None]] = (),
        tenant: bytes = b"",
        compute_block_s: float = 0.0,
        hold: int = 0,
        num_readers: int = 1,
    ) -> wire.SlotsGranted:
        terms = (tenant, compute_block_s, hold, num_readers)
        request = wire.ExchangeSlots(2, list(acquire), list(reserve), *terms)
        granted = self.service.answer(1, request)
        assert isinstance(granted, wire.SlotsGranted)
        self.turn()
        return granted

    def end_hold(self, hold: int, reader: int | None = None) -> None:
        self.service.answer(1, wire.EndHold(self.generation, hold, reader))
        self.turn()

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
        self.service.index.clear()

    def memory(self, pair: tuple[int, int]) -> BlockBytes:
        return self.pool.part(pair[0] * PAGE_BYTES, PAGE_BYTES)

    def release(self, granted: wire.SlotsGranted) -> None:
        assert granted.lease_id is not None
        self.service.answer(1, wire.ReleaseLeases(self.generation, granted.lease_id))
        self.turn()

    def arrivals(self, granted: wire.SlotsGranted) -> list[Lookup]:
        return self.view.states([Slot(i, self.generation, s) for i, s in granted.slots])

    def lookup(self, *keys: bytes) -> list[Lookup]:
        looked = self.service.answer(1, wire.LookupKeys(4, list(keys)))
        assert isinstance(looked, wire.LookupStates)
        return [Lookup(state) for state in looked.states]

    def report(self, number: int = 0) -> TierReport:
        return self.service.stats().tiers[number]


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
