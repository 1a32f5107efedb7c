"""Promotion of blocks from tiers into slots that their readers have already leased."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import takewhile

from banaserve.kvstore.daemon.carved_pool import CarvedPool
from banaserve.kvstore.daemon.tiering.attached_tier import AttachedTier, TierLoad
from banaserve.kvstore.daemon.tiering.promotion_choice import choose
from banaserve.kvstore.index.records import Grant, IndexEntry
from banaserve.kvstore.leases import Lookup
from banaserve.kvstore.tiers.interface import TierOutcome

MAX_LOADING_BYTES = 256 * 2**20
"""Maximum total size of the blocks that one tier reads at a time."""
PROBE_AFTER_S = 10.0
"""Time in seconds since its last load after which a tier whose blocks are declined is measured
again, by loading a block for which no client waits."""
_SHORTEST_WAIT_S = 1e-4


@dataclass(frozen=True, slots=True)
class PromotionRequest:
    """Request of an exchange to acquire blocks, for ``owner``, charged to ``tenant``.

    Attributes:
        keys: Keys in the order of their chain, with their namespace as in the index.
        first_parent: Parent of the first key; None if it is not known.
        compute_block_s: Time to compute one block, in seconds; 0.0 if it is not known.
    """

    keys: Sequence[bytes]
    first_parent: bytes | None
    owner: int
    tenant: bytes
    compute_block_s: float


@dataclass(slots=True)
class PromotionResult:
    """Outcome of a ``PromotionRequest``; see ``Exchanged`` for the numbers.

    ``grant`` is None if there is nothing to lease.
    """

    grant: Grant | None
    wait_s: float = 0.0
    undecided: bool = False
    num_declined: int = 0
    num_unfetched: int = 0


class Promoter:
    """Decisions on promotions, and their execution; see ``Tiering`` for the arguments."""

    def __init__(
        self, tiers: Sequence[AttachedTier], carved: CarvedPool, clock: Callable[[], float]
    ) -> None:
        self.num_joined = 0
        self._tiers = tiers
        self._carved = carved
        self._clock = clock
        self._loads: dict[int, tuple[AttachedTier, TierLoad]] = {}
        self._expected: dict[int, Callable[[float], float]] = {}

    def expect(self, entry: IndexEntry, left_s: Callable[[float], float] | None) -> None:
        """Note that the slot of ``entry`` is filled by a push, not by a tier.

        ``left_s`` predicts the remaining seconds at a time of the clock; None ends the filling.
        """
        if left_s is None:
            self._expected.pop(entry.serial, None)
        else:
            self._expected[entry.serial] = left_s

    def source_of(self, entry: IndexEntry) -> AttachedTier | None:
        """Return the tier that fills the slot of ``entry``; None if no tier does."""
        found = self._loads.get(entry.serial)
        return found and found[0]

    def promote(self, request: PromotionRequest) -> PromotionResult:
        """Lease the prefix of the keys that is in memory, or in tiers and worth fetching."""
        result = PromotionResult(self._carved.index.acquire(request.keys, request.owner))
        at = 0
        if result.grant is not None:
            at = len(result.grant.entries)
            self._join(result, result.grant.entries)
        while self._tiers and at < len(request.keys):
            found = self._carved.index.find(request.keys[at:])
            if found:
                self._lease(result, request, found)
                self._join(result, found)
                at += len(found)
            num_promoted = self._promote_run(result, request, at)
            if not num_promoted:
                break
            at += num_promoted
        return result

    def lookup(self, keys: Sequence[bytes], states: list[Lookup]) -> None:
        """Fill in the tiers' states of the keys whose state in ``states`` is MISS."""
        for tier in self._tiers:
            missing = [i for i, state in enumerate(states) if state is not Lookup.HIT]
            found = tier.lookup([keys[i] for i in missing])
            for i, state in zip(missing, found, strict=True):
                if states[i] in (Lookup.MISS, Lookup.ASKED) and state is not Lookup.MISS:
                    states[i] = Lookup.ASKED if state is Lookup.PENDING else state

    def pump(self, tier: AttachedTier) -> None:
        """Submit the loads that ``tier`` accepts now."""
        carved = self._carved
        while tier.waiting and not tier.is_faulty:
            if tier.loading and (len(tier.loading) + 1) * carved.slot_bytes > MAX_LOADING_BYTES:
                return
            load = tier.waiting[0]
            key = load.entry.key
            ticket = tier.submit_load(key, carved.bytes_of(load.entry))
            if ticket is not None:
                load.taken_s = self._clock()
                tier.loading[ticket] = tier.waiting.popleft()
            elif tier.is_busy and tier.lookup([key]) != [Lookup.MISS]:
                # The tier's queue is full, or its knowledge of the key is out of date: the next
                # call, after a transfer has ended, tries again.
                return
            elif not tier.is_faulty:
                self._fail(tier, tier.waiting.popleft())

    def end(self, tier: AttachedTier, load: TierLoad, outcome: TierOutcome) -> None:
        """Finish a load of ``tier`` that has ended and was removed from ``tier.loading``."""
        tier.last_load_s = self._clock()
        if outcome is not TierOutcome.DONE:
            self._fail(tier, load)
            return
        seconds = tier.last_load_s - load.began_s
        tier.speed.learn(load.queued_bytes, seconds)
        tier.counters.promoted += 1
        if load.predicted_s:
            tier.counters.predicted_fetch_s += load.predicted_s
            tier.counters.measured_fetch_s += seconds
        self._carved.index.end_promotion(load.entry, filled=True)
        del self._loads[load.entry.serial]

    def desert(self, tier: AttachedTier) -> None:
        """Give up all loads of ``tier``, which may still be writing to slots of accepted loads."""
        while tier.waiting:
            self._fail(tier, tier.waiting.popleft())
        for load in tier.loading.values():
            tier.counters.promotion_failures += 1
            self._carved.index.drop(load.entry)
            del self._loads[load.entry.serial]

    def cancel_waiting(self) -> None:
        """Give up every promotion that no tier has accepted yet."""
        for tier in self._tiers:
            while tier.waiting:
                self._give_up(tier.waiting.popleft().entry)

    def _join(self, result: PromotionResult, entries: Sequence[IndexEntry]) -> None:
        coming = [entry for entry in entries if not entry.ready]
        self.num_joined += len(coming)
        self._wait_for(result, coming)

    def _wait_for(self, result: PromotionResult, coming: Sequence[IndexEntry]) -> None:
        now_s = self._clock()
        for entry in coming:
            if (left_s := self._expected.get(entry.serial)) is not None:
                wait_s = left_s(now_s)
            else:
                _, load = self._loads[entry.serial]
                wait_s = load.began_s + load.predicted_s - now_s
            result.wait_s = max(result.wait_s, wait_s, _SHORTEST_WAIT_S)

    def _lease(
        self, result: PromotionResult, request: PromotionRequest, entries: Sequence[IndexEntry]
    ) -> None:
        if result.grant is None:
            result.grant = self._carved.index.lease(entries, request.owner)
        else:
            self._carved.index.extend(result.grant, entries)

    def _promote_run(self, result: PromotionResult, request: PromotionRequest, at: int) -> int:
        """Promote the next keys; return their number, or 0 if ``promote`` ends after them."""
        index = self._carved.index
        absent = list(takewhile(lambda key: index.get(key) is None, request.keys[at:]))
        sources, undecided = self._sources(absent)
        if not sources:
            result.undecided = undecided
            return 0
        slot_bytes = self._carved.slot_bytes
        num_chosen = choose(
            sources,
            [(tier.speed, tier.num_queued * slot_bytes) for tier in self._tiers],
            slot_bytes,
            request.compute_block_s,
            result.wait_s,
        )
        promoted = self._start(request, at, sources[:num_chosen])
        if promoted:
            self._lease(result, request, promoted)
            self._wait_for(result, promoted)
        result.num_unfetched = num_chosen - len(promoted)
        if num_chosen < len(sources):
            result.num_declined = len(sources) - num_chosen
            self._decline(request, at + num_chosen, sources[num_chosen:])
        elif len(promoted) == len(sources):
            result.undecided = undecided
            return 0 if undecided else len(promoted)
        return 0

    def _sources(self, keys: Sequence[bytes]) -> tuple[list[int], bool]:
        """Return the tier of each key before the first absent one, and if that is undecided."""
        sources = [-1] * len(keys)
        undecided: set[int] = set()
        for number, tier in enumerate(self._tiers):
            missing = [i for i, source in enumerate(sources) if source < 0]
            states = tier.lookup([keys[i] for i in missing])
            for i, state in zip(missing, states, strict=True):
                if state is Lookup.HIT:
                    sources[i] = number
                elif state is Lookup.PENDING:
                    undecided.add(i)
        run = list(takewhile(lambda source: source >= 0, sources))
        return run, len(run) in undecided

    def _start(
        self, request: PromotionRequest, at: int, sources: Sequence[int]
    ) -> list[IndexEntry]:
        """Begin to fetch the keys from ``at`` on, as long as slots are available."""
        started: list[IndexEntry] = []
        for number, source in enumerate(sources, at):
            parent = request.keys[number - 1] if number else request.first_parent
            entry = self._carved.promote(request.keys[number], parent, request.tenant)
            if entry is None:
                break
            self._enqueue(self._tiers[source], entry)
            started.append(entry)
        return started

    def _enqueue(self, tier: AttachedTier, entry: IndexEntry) -> None:
        queued_bytes = (tier.num_queued + 1) * self._carved.slot_bytes
        predicted_s = tier.speed.predict_s(queued_bytes)
        load = TierLoad(entry, self._clock(), queued_bytes, predicted_s)
        tier.waiting.append(load)
        self._loads[entry.serial] = (tier, load)

    def _decline(self, request: PromotionRequest, at: int, sources: Sequence[int]) -> None:
        for source in sources:
            self._tiers[source].counters.declined += 1
        tier = self._tiers[sources[0]]
        if not tier.num_queued and self._clock() - tier.last_load_s > PROBE_AFTER_S:
            self._start(request, at, sources[:1])

    def _fail(self, tier: AttachedTier, load: TierLoad) -> None:
        """Queue a failed load in a tier below ``tier`` that has its block, or give it up."""
        tier.counters.promotion_failures += 1
        entry = load.entry
        for other in self._tiers[self._tiers.index(tier) + 1 :]:
            if other.lookup([entry.key]) == [Lookup.HIT]:
                self._enqueue(other, entry)
                return
        self._give_up(entry)

    def _give_up(self, entry: IndexEntry) -> None:
        self._carved.index.end_promotion(entry, filled=False)
        del self._loads[entry.serial]
