"""The store's service over two tiers, in virtual time and from one seed: nobody reads wrong bytes.

Clients ask, write, read, end their leases, or die in the middle and go on writing until they are
known to be dead. Tiers end copies in any order and way, or break. A failure names its seed.
"""

from __future__ import annotations

import random
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest

from banaserve.kvstore import wire
from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.tiers.interface import TierOutcome
from depth import says_seed, seeds
from fingerprints import FINGERPRINT
from tiering_doubles import KEYS, NAMESPACE, ScriptedTier, Store

pytestmark = pytest.mark.deep

SEEDS = seeds(in_long=10_000, otherwise=80)
PARTS = 4
NUM_TURNS = 250
CHAINS = [KEYS[:6], KEYS[:3] + KEYS[6:9], KEYS[9:14], KEYS[14:16]]
"""Two begin alike; together they do not fit into memory."""
MOST_CLIENTS = 4
OUTCOMES = [TierOutcome.DONE] * 6 + [TierOutcome.FAILED, TierOutcome.MISSING, TierOutcome.CORRUPT]


@dataclass
class Client:
    """What one connection holds.

    Attributes:
        leases: Keys with what was granted for them; which of them has been readable.
        writing: Keys with slot and serial of blocks that are being written.
        is_dead: The store knows that it has gone, and not yet that it writes no more.
    """

    session: int
    leases: list[tuple[list[bytes], wire.SlotsGranted, set[int]]] = field(default_factory=list)
    writing: list[tuple[bytes, tuple[int, int]]] = field(default_factory=list)
    is_dead: bool = False


class Run:
    """One seed's run."""

    def __init__(self, stack: ExitStack, seed: int) -> None:
        self.draws = random.Random(seed)
        self.tiers = [ScriptedTier("fast", depth=2), ScriptedTier("slow", depth=4)]
        self.store = Store(stack, *self.tiers, quota=self.draws.choice([1.0, 0.75]))
        self.clients: list[Client] = []
        self.last_session = 1
        self.num_read = self.num_promoted = 0

    def go(self) -> None:
        acts = {
            self.connect: 4,
            self.ask: 10,
            self.write: 16,
            self.read: 6,
            self.release: 8,
            self.die: 1,
            self.is_known_dead: 2,
            self.end_copies: 12,
            self.break_tier: 0.02,
            self.clear: 0.05,
            self.keep: 3,
            self.forget: 3,
            self.wait: 2,
            self.hang: 0.02,
        }
        for _ in range(NUM_TURNS):
            (act,) = self.draws.choices(list(acts), list(acts.values()))
            act()
            self.store.turn()
            self.check()
        self.end()

    # ---- what clients do

    def alive(self) -> Client | None:
        alive = [one for one in self.clients if not one.is_dead]
        return self.draws.choice(alive) if alive else None

    def connect(self) -> None:
        if len(self.clients) == MOST_CLIENTS:
            return
        self.last_session += 1
        name = self.draws.choice(["p0", "d0"])
        hello = wire.ClientHello(1, wire.PROTOCOL_VERSION, name, FINGERPRINT)
        assert isinstance(self.store.service.greet(self.last_session, hello), wire.Welcome)
        self.clients.append(Client(self.last_session))

    def ask(self) -> None:
        client = self.alive()
        if client is None:
            return
        chain = self.draws.choice(CHAINS)
        at = self.draws.randrange(len(chain) + 1)
        acquire, rest = chain[:at], chain[at : at + self.draws.randrange(4)]
        parents = [chain[at - 1] if at else None, *rest]
        granted = self.store.service.answer(
            client.session,
            wire.ExchangeSlots(
                2,
                acquire,
                list(zip(rest, parents, strict=False)),
                self.draws.choice([b"", b"a", b"b"]),
                self.draws.choice([0.0, 0.0, 1e-9, 1.0]),
            ),
        )
        assert isinstance(granted, wire.SlotsGranted)
        if granted.lease_id is not None:
            client.leases.append((acquire[: len(granted.slots)], granted, set()))
        found = zip(rest, granted.reserved, strict=True)
        client.writing += [(key, pair) for key, pair in found if pair is not None]

    def write(self) -> None:
        client = self.alive()
        if client is None or not client.writing:
            return
        key, pair = client.writing.pop(self.draws.randrange(len(client.writing)))
        memory = self.store.memory(pair)
        generation, serials = self.store.generation, [pair[1]]
        if self.draws.random() < 0.2:
            memory[: memory.size // 2] = key[0]
            part = self.draws.choice([None, 0])
            self.store.service.answer(client.session, wire.Abandon(generation, serials, part))
        else:
            memory[:] = key[0]
            done = self.store.service.answer(client.session, wire.Commit(3, generation, serials, 0))
            assert done == wire.Committed(3, True)

    def read(self) -> None:
        """What has once been readable under a lease stays so, and is what its key means."""
        client = self.alive()
        if client is None:
            return
        for keys, granted, readable in client.leases:
            states = self.store.arrivals(granted)
            for number, (key, pair, state) in enumerate(
                zip(keys, granted.slots, states, strict=True)
            ):
                assert state is Lookup.HIT or number not in readable
                if state is Lookup.HIT:
                    readable.add(number)
                    assert np.all(self.store.memory(pair) == key[0]), key
                    self.num_read += 1

    def release(self) -> None:
        client = self.alive()
        if client is None or not client.leases:
            return
        _, granted, _ = client.leases.pop(self.draws.randrange(len(client.leases)))
        self.store.release(granted)

    def keep(self) -> None:
        client = self.alive()
        if client is not None:
            chain, keep_s = self.draws.choice(CHAINS), self.draws.choice([0.5, 5.0])
            told = wire.KeepBlocks(self.store.generation, chain, keep_s)
            self.store.service.answer(client.session, told)

    def die(self) -> None:
        client = self.alive()
        if client is None:
            return
        held = self.store.service.leave(client.session)
        assert (held is not None) == bool(client.leases or client.writing)
        client.is_dead = held is not None
        if held is None:
            self.clients.remove(client)

    def is_known_dead(self) -> None:
        for client in [one for one in self.clients if one.is_dead]:
            for _, pair in client.writing:  # up to now it may have written
                self.store.memory(pair)[:] = 0xEE
            self.store.service.drop(client.session)
            self.clients.remove(client)

    # ---- what becomes of tiers, and of time

    def end_copies(self) -> None:
        tier = self.draws.choice(self.tiers)
        if not tier.closed:
            tier.end(self.draws.choice(OUTCOMES), only=self.draws.choice(["", "load", "store"]))

    def break_tier(self) -> None:
        self.draws.choice(self.tiers).raises = OSError("broken")

    def clear(self) -> None:
        self.store.service.answer(1, wire.Clear(5))

    def forget(self) -> None:
        self.store.forget()

    def wait(self) -> None:
        self.store.now_s += self.draws.choice([0.01, 0.1, 1.0])

    def hang(self) -> None:
        self.store.now_s += 61.0

    # ---- what must hold

    def check(self) -> None:
        for tier in self.tiers:
            for name, data in tier.blocks.items():
                assert set(data) == {name[len(NAMESPACE)]}, name

    def end(self) -> None:
        """All go; nothing is held, promised or on its way."""
        self.read()
        for client in self.clients:
            if not client.is_dead:
                self.store.service.leave(client.session)
            self.store.service.drop(client.session)
        for _ in range(100):
            for tier in self.tiers:
                if not tier.closed:
                    tier.end()
            self.store.turn(0.01 if any(tier.raises for tier in self.tiers) else 0.0)
            stats = self.store.service.stats()
            if not stats.promoting_slots and not self.store.tiering.num_pending:
                break
        self.check()
        assert (stats.num_leases, stats.leased_slots, stats.writing_slots) == (0, 0, 0)
        assert (stats.promoting_slots, stats.quarantined_slots) == (0, 0)
        self.num_promoted = sum(tier.promoted for tier in stats.tiers)


@pytest.mark.parametrize("part", range(PARTS))
def test_nobody_reads_wrong_bytes_and_nothing_is_left(part: int) -> None:
    num_read = num_promoted = 0
    for seed in SEEDS[part::PARTS]:
        with ExitStack() as stack, says_seed(seed):
            run = Run(stack, seed)
            run.go()
            num_read += run.num_read
            num_promoted += run.num_promoted
    if len(SEEDS) > 1:
        assert num_read > len(SEEDS) // PARTS
        assert num_promoted > len(SEEDS) // PARTS // 8
