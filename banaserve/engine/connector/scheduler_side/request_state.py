"""State of one request in the connector's scheduler side: leases, pending loads, blocks to save.

``PendingPromotion`` bounds the wait for a prefix that comes from a tier below the pool.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum

from banaserve.base.access.cache_salt import TenantSalt
from banaserve.engine.compat import kv_cache as compat
from banaserve.engine.connector.handover import Handover
from banaserve.engine.continuation import output_of
from banaserve.kvstore.client.cost_gate import Verdict
from banaserve.kvstore.leases import Lease, Lookup, Slot

PATIENCE = 4.0
"""Maximum wait for a promotion, as a multiple of the predicted time."""
SHORTEST_WAIT_S = 0.25
"""Shortest time limit of a wait, in seconds.

Predictions of a few milliseconds are unreliable on a busy machine, and the first ones are useless.
"""
LONGEST_WAIT_S = 10.0

Arrivals = Callable[[Sequence[Slot]], list[Lookup]]


class PromotionOutcome(Enum):
    """Outcome of a wait: all blocks arrived, a block failed, or the time limit passed."""

    ARRIVED = "arrived"
    FAILED = "failed"
    LATE = "late"


@dataclass(slots=True)
class PendingPromotion:
    """The leased slots of one request, some of which are not readable yet.

    Attributes:
        slots: Slots in the order of the prefix; only the first ``num_ready`` are known readable.
        began_s: Time at which the store was asked, on the engine's clock.
        predicted_s: Store's prediction of the seconds from ``began_s`` until the last is readable.
        compute_s: Seconds that computing the pending blocks would take; 0 if unknown.
        outcome: Outcome of the wait; None while it is worth waiting.
        num_pending: Number of slots that were not readable at first.
    """

    slots: Sequence[Slot]
    num_ready: int
    began_s: float
    predicted_s: float
    compute_s: float = 0.0
    outcome: PromotionOutcome | None = field(default=None, init=False)
    num_pending: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_pending = len(self.slots) - self.num_ready

    @property
    def num_arrived(self) -> int:
        """Number of the pending blocks that have arrived."""
        return self.num_ready - (len(self.slots) - self.num_pending)

    @property
    def deadline_s(self) -> float:
        """Time until which it is worth waiting, on the engine's clock.

        A request that waits as long as computing takes, and then computes, wastes at most half of
        its time.
        """
        wait_s = max(SHORTEST_WAIT_S, PATIENCE * self.predicted_s, self.compute_s)
        return self.began_s + min(wait_s, LONGEST_WAIT_S)

    def look(self, arrivals: Arrivals, now_s: float) -> int | None:
        """Return how many slots from the first on are readable; None while it is worth waiting.

        A slot that failed ends the prefix, and the slots after it are not waited for.
        """
        if self.outcome is None:
            self._advance(arrivals(self.slots[self.num_ready :]), now_s)
        return None if self.outcome is None else self.num_ready

    def _advance(self, states: Sequence[Lookup], now_s: float) -> None:
        until = next((i for i, state in enumerate(states) if state is Lookup.MISS), len(states))
        ready = next((i for i, state in enumerate(states) if state is not Lookup.HIT), len(states))
        self.num_ready += ready
        if ready == until:
            self.outcome = (
                PromotionOutcome.ARRIVED if until == len(states) else PromotionOutcome.FAILED
            )
        elif now_s >= self.deadline_s:
            self.outcome = PromotionOutcome.LATE


@dataclass(frozen=True, slots=True)
class SaveCandidate:
    """A block to save where the store lacks it.

    Attributes:
        end_tokens: Number of the request's computed tokens at which the block is complete.
        key: Key of the block in the store.
        parent: Key of the block before it; None for the first.
    """

    index: int
    end_tokens: int
    key: bytes
    parent: bytes | None


@dataclass(frozen=True, slots=True)
class PendingSave:
    """An offer that the store accepted: the block will be saved to ``slot``."""

    index: int
    end_tokens: int
    slot: Slot


@dataclass
class RequestState:
    """State of one request, from its first match to its end.

    Attributes:
        tenant: Tenant that the request's blocks in the store are charged to.
        lease: Lease that keeps the fetched blocks in the store until they have been copied.
        hits: Slots of the fetched blocks, from block ``first_hit`` on.
        promotion: Promotion of ``hits``; None where the store is not being asked.
        ask_again_at_s: Time at which to ask the store again, while it is undecided or has no room;
            None otherwise.
        undecided_until_s: Time until which the store is asked again while it is undecided.
        verdict: Verdict of the cost gate on the blocks found; None where none were found.
        num_found: Number of blocks that the verdict is about.
        offers: Blocks last offered to the store.
        num_claimed: Index below which all full blocks have been offered to the store.
        handover: Facts about the other legs of the request.
        has_hold: True if the store may know of the hold.
        room_until_s: Time until which this leg waits for room in the store; None where there has
            been room so far.
        refused_s: Time at which the store was last asked and had no room for the leg.
        writer_until_s: Time until which this leg waits for blocks of its prefix that another leg is
            computing; None where it has met none.
        writer_look_s: Time between two questions about them, in seconds.
        writer_since_s: Time at which that wait began; None before it and after it.
        prefix_tokens: Number of tokens of the prefix that the store was last asked for.
        prefix_blocks: Number of blocks of that prefix, those of its states included.
        is_counted: True if the store has counted the blocks that the request asks for.
    """

    request: compat.Request
    tenant: bytes = b""
    lease: Lease | None = None
    first_hit: int = 0
    hits: list[Slot] = field(default_factory=list)
    promotion: PendingPromotion | None = None
    ask_again_at_s: float | None = None
    undecided_until_s: float = 0.0
    verdict: Verdict | None = None
    num_found: int = 0
    offers: list[SaveCandidate] = field(default_factory=list)
    saves: list[PendingSave] = field(default_factory=list)
    num_claimed: int = 0
    handover: Handover = field(default_factory=Handover)
    has_hold: bool = False
    room_until_s: float | None = None
    refused_s: float = 0.0
    writer_until_s: float | None = None
    writer_look_s: float = 0.0
    writer_since_s: float | None = None
    prefix_tokens: int = 0
    prefix_blocks: int = 0
    is_counted: bool = False

    @classmethod
    def of(cls, request: compat.Request) -> RequestState:
        return cls(
            request,
            TenantSalt.of(request.cache_salt).account,
            handover=Handover.of(request.kv_transfer_params),
        )

    @property
    def own_hold(self) -> int:
        """Hold of the blocks that this prefill leg leaves in the store; 0 for none."""
        return self.handover.hold if self.handover.leaves_tail else 0

    @property
    def hold_to_end(self) -> int:
        """Hold of blocks that this decode leg is to read; 0 for none."""
        return 0 if self.handover.leaves_tail else self.handover.hold

    @property
    def has_run(self) -> bool:
        """True if the request was preempted here: it has output beyond what it came with."""
        request = self.request
        return request.num_output_tokens > len(output_of(request.sampling_params))

    @property
    def handed_over(self) -> int | None:
        """Number of tokens that a prefill leg computed for this decode leg; None for other legs."""
        return None if self.has_run else self.handover.tokens

    @property
    def is_owed(self) -> bool:
        """True if the request was sent here because the store has or awaits its prompt."""
        is_stored = self.handover.is_stored or self.handover.tokens is not None
        return is_stored and not self.has_run

    @property
    def goes_on(self) -> bool:
        """True if the request continues the output of another instance.

        That instance may have died while it wrote blocks.
        """
        return bool(output_of(self.request.sampling_params)) and not self.has_run

    @property
    def waits_long(self) -> bool:
        """True if the request waits for blocks being written however cheap they are to compute."""
        return self.is_owed or self.goes_on

    def keep(self, offers: Sequence[SaveCandidate], reserved: Sequence[Slot | None]) -> None:
        """Remember which offers the store accepted."""
        for offer, slot in zip(offers, reserved, strict=False):
            if slot is not None:
                self.saves.append(PendingSave(offer.index, offer.end_tokens, slot))

    def take_ready(self, num_computed: int) -> list[PendingSave]:
        """Remove and return the saves whose blocks are complete with ``num_computed`` tokens."""
        ready = [save for save in self.saves if save.end_tokens <= num_computed]
        if ready:
            self.saves = [save for save in self.saves if save.end_tokens > num_computed]
        return ready


def full_block_offers(keys: Sequence[bytes], first: int, block_size: int) -> list[SaveCandidate]:
    """Return the offers of full blocks from block ``first`` on."""
    return [
        SaveCandidate(i, (i + 1) * block_size, keys[i], keys[i - 1] if i else None)
        for i in range(first, len(keys))
    ]
