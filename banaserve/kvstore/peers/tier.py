"""Blocks in the stores of other machines, as one tier of this store."""

from __future__ import annotations

import itertools
import threading
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.peers.link import (
    NUM_STREAMS,
    AskedPeer,
    LinkChange,
    PeerEvent,
    PeerLink,
    PeerLoad,
)
from banaserve.kvstore.peers.messages import MAX_BLOCK_BYTES, MAX_KEYS
from banaserve.kvstore.stats import PEERS, TierStats
from banaserve.kvstore.tiers.counters import TierCounters
from banaserve.kvstore.tiers.interface import (
    BlockBytes,
    BlockName,
    Completion,
    TierOutcome,
)
from banaserve.kvstore.tiers.mailbox import Mailbox

HIT_VALID_S = 2.0
MISS_VALID_S = 0.2
"""Time in seconds for which a miss is believed. It is short, so that a block that another machine
has just computed is found soon."""
_MAX_ANSWERS = 65536
_MAX_ASKED = 16384
_MAX_LOADS = 8 * NUM_STREAMS
"""Maximum number of loads under way from one peer."""


class _Answer(NamedTuple):
    holders: tuple[PeerLink, ...]
    valid_until_s: float


@dataclass(eq=False, slots=True)
class _Question:
    """Answers about a key: peers that have not answered yet, and those that have the block."""

    open: set[PeerLink]
    holders: list[PeerLink] = field(default_factory=list)


class PeersTier:
    """Tier that reads blocks in the memory of other stores, and writes none.

    It begins without peers, which all know ``key``. Each is asked about every key that is looked up
    and not known, and answers are valid for a short time. A peer that does not answer counts as
    having no blocks: they are computed again.
    """

    name = PEERS

    def __init__(self, key: bytes) -> None:
        self._events: Mailbox[PeerEvent] = Mailbox()
        self._key = key
        self._links: list[PeerLink] = []
        self._closing: list[threading.Thread] = []
        self._is_closed = False
        self._tickets = itertools.count(1)
        self._loads: dict[int, PeerLoad] = {}
        self._completions: list[Completion] = []
        self._answers: dict[bytes, _Answer] = {}
        self._questions: dict[bytes, _Question] = {}
        self._counters = TierCounters()

    @property
    def fd(self) -> int:
        """File descriptor, readable when ``poll`` or ``lookup`` may have new results."""
        return self._events.fd

    def set_addresses(self, addresses: Sequence[tuple[str, int]]) -> None:
        """Ask these peers from now on, and no others; do not wait until new ones are connected.

        Loads under way from a peer that is left out fail.

        Raises:
            RuntimeError: There are no more threads; a later call sets the addresses that are left.
        """
        if self._is_closed:
            return
        self._take_events()
        wanted = dict.fromkeys(addresses)
        for link in [one for one in self._links if one.address not in wanted]:
            self._leave(link)
        here = {link.address for link in self._links}
        for host, port in wanted:
            if (host, port) not in here:
                self._links.append(PeerLink(host, port, self._key, self._events))

    def _leave(self, link: PeerLink) -> None:
        # Closed in another thread, since the link's threads may be waiting for a lost machine.
        closing = threading.Thread(target=link.close, name=f"close-{link.name}")
        closing.start()
        self._closing = [*(one for one in self._closing if one.is_alive()), closing]
        self._links.remove(link)
        link.problem = f"{link.name}: it is no peer any more"
        self._forget(link)
        for key in [key for key, question in self._questions.items() if link in question.open]:
            self._on_answer(link, key, is_there=False)

    def lookup(self, keys: Sequence[bytes]) -> list[Lookup]:
        """Return the state of each key by the peers' valid answers; ask about unknown keys."""
        self._take_events()
        up = [link for link in self._links if not link.problem]
        if not up:
            return [Lookup.MISS] * len(keys)
        now_s, unknown = time.monotonic(), []
        found: list[Lookup] = []
        for key in keys:
            answer, question = self._answers.get(key), self._questions.get(key)
            if answer is not None and now_s < answer.valid_until_s:
                found.append(Lookup.HIT if answer.holders else Lookup.MISS)
            elif question is not None:
                found.append(Lookup.HIT if question.holders else Lookup.PENDING)
            elif len(self._questions) < _MAX_ASKED:
                self._questions[key] = _Question(set(up))
                unknown.append(key)
                found.append(Lookup.PENDING)
            else:
                found.append(Lookup.MISS)
        for at in range(0, len(unknown), MAX_KEYS):
            for link in up:
                link.ask(unknown[at : at + MAX_KEYS])
        return found

    def submit_store(self, block: BlockName, source: BlockBytes) -> int | None:
        """Return None: peers fetch the blocks that they need themselves."""
        return None

    def submit_load(self, key: bytes, target: BlockBytes) -> int | None:
        """Begin to read a block from the peer with the fewest loads; None if impossible."""
        self._take_events()
        holders = [one for one in self._holders(key) if not one.problem]
        if not holders or target.size > MAX_BLOCK_BYTES:
            self._counters.missing += 1
            return None
        num_loads = Counter(load.link for load in self._loads.values())
        link = min(holders, key=lambda one: num_loads[one])
        if num_loads[link] >= _MAX_LOADS:
            return None
        load = PeerLoad(next(self._tickets), key, target, link)
        self._loads[load.ticket] = load
        self._counters.load_speed.begin(time.monotonic())
        link.load(load)
        return load.ticket

    def poll(self) -> list[Completion]:
        """Return the loads that have ended since the last call."""
        self._events.calm()
        self._take_events()
        completions, self._completions = self._completions, []
        return completions

    def clear(self) -> int:
        """Forget the peers' answers; their blocks stay. Return 0."""
        self._answers.clear()
        return 0

    def stats(self) -> TierStats:
        """Return the current counters and gauges; not available if no peer answers."""
        self._take_events()
        problems = [link.problem for link in self._links if link.problem]
        is_alone = bool(problems) and len(problems) == len(self._links)
        return self._counters.stats(
            self.name,
            available=not is_alone,
            problem="; ".join(problems),
            capacity_bytes=0,
            used_bytes=0,
            num_blocks=0,
            in_flight=len(self._loads),
        )

    def check(self) -> None:
        """Assert the invariants that hold between two calls."""
        assert len(self._answers) <= _MAX_ANSWERS
        assert len(self._questions) <= _MAX_ASKED

    def close(self) -> None:
        """Abort all loads; return when no thread touches memory any more."""
        self._is_closed = True
        for link in self._links:
            link.close()
        for thread in self._closing:
            thread.join()
        self._events.close()

    def _holders(self, key: bytes) -> Sequence[PeerLink]:
        answer, question = self._answers.get(key), self._questions.get(key)
        if question is not None and question.holders:
            return question.holders
        return answer.holders if answer is not None else ()

    def _take_events(self) -> None:
        for event in self._events.take():
            match event:
                case PeerLoad():
                    self._on_ended(event)
                case AskedPeer(link, keys, states):
                    for key, state in zip(keys, states or bytes(len(keys)), strict=True):
                        self._on_answer(link, key, state == Lookup.HIT)
                case LinkChange(link, problem) if link in self._links:
                    link.problem = problem
                    if problem:
                        self._forget(link)

    def _on_answer(self, link: PeerLink, key: bytes, is_there: bool) -> None:
        question = self._questions.get(key)
        if question is None or link not in question.open:
            return
        question.open.discard(link)
        if is_there:
            question.holders.append(link)
        if not question.open:
            del self._questions[key]
            self._learn(key, tuple(question.holders))

    def _forget(self, link: PeerLink) -> None:
        """Forget answers that name ``link``: the peer may restart without its blocks."""
        gone = [key for key, answer in self._answers.items() if link in answer.holders]
        for key in gone:
            del self._answers[key]
        for question in self._questions.values():
            if link in question.holders:
                question.holders.remove(link)

    def _learn(self, key: bytes, holders: tuple[PeerLink, ...]) -> None:
        self._answers.pop(key, None)
        valid_s = HIT_VALID_S if holders else MISS_VALID_S
        self._answers[key] = _Answer(holders, time.monotonic() + valid_s)
        if len(self._answers) > _MAX_ANSWERS:
            del self._answers[next(iter(self._answers))]

    def _on_ended(self, load: PeerLoad) -> None:
        assert load.outcome is not None
        del self._loads[load.ticket]
        self._completions.append(Completion(load.ticket, load.outcome))
        self._counters.end_load(time.monotonic(), load.memory.size, load.outcome)
        if load.outcome is not TierOutcome.DONE:
            others = tuple(one for one in self._holders(load.key) if one is not load.link)
            self._learn(load.key, others)
