"""Records of the index: the block of a key, a lease, a hold, and the possessions of an owner."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

MAX_SERIAL = 2**60
HOLD_S = 300.0
"""Time in seconds after which a hold ends by itself: the front door that would end it has died."""


@dataclass(slots=True)
class StoreCounters:
    """Counters of events, which outlive the index of one pool geometry."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    commits: int = 0
    quota_evictions: int = 0
    quota_refusals: int = 0


class IndexEntry:
    """Block of a key.

    It is WRITING until every part is committed, or ``promoting`` until a tier or a push has filled
    it, and READY after that. It is ``dropped`` if its key was removed from the index while its slot
    is still in use.

    Attributes:
        num_leases: Number of leases and holds that cover the block.
        num_holds: Number of holds among these.
        num_pins: Number of copies to or from the slot, by tiers or peers, under way or about to
            begin.
        last_used: Tick of the last acquire or commit.
        checksum: Checksum of the slot's bytes when it became READY, if the store keeps checksums.
    """

    __slots__ = (
        "checksum",
        "dropped",
        "ended_parts",
        "failed",
        "key",
        "last_used",
        "num_holds",
        "num_leases",
        "num_parts",
        "num_pins",
        "owner",
        "parent",
        "promoting",
        "ready",
        "serial",
        "slot",
        "tenant",
    )

    def __init__(
        self,
        key: bytes,
        parent: bytes | None,
        slot: int,
        serial: int,
        tenant: bytes,
        owner: int = 0,
        num_parts: int = 0,
    ) -> None:
        self.key = key
        self.parent = parent
        self.slot = slot
        self.serial = serial
        self.tenant = tenant
        self.owner = owner
        self.num_parts = num_parts
        self.ended_parts = 0
        self.failed = False
        self.ready = False
        self.promoting = False
        self.dropped = False
        self.checksum = 0
        self.num_leases = 0
        self.num_holds = 0
        self.num_pins = 0
        self.last_used = 0


class SlotWatcher(Protocol):
    """Observer of slot changes, called within an operation; it must not call the index."""

    def became_pending(self, entry: IndexEntry) -> None:
        """Note that a tier or a push is about to fill the slot."""
        ...

    def became_ready(self, entry: IndexEntry) -> None:
        """Note that the slot may be leased."""
        ...

    def failed(self, entry: IndexEntry) -> None:
        """Note that the block in the slot is lost to its leases."""
        ...

    def became_free(self, entry: IndexEntry) -> None:
        """Note that the slot is no longer in use."""
        ...


@dataclass(slots=True)
class Grant:
    """Lease by which ``owner`` may read the slots of ``entries``."""

    lease_id: int
    owner: int
    entries: list[IndexEntry]

    @property
    def slots(self) -> list[tuple[int, int]]:
        """Slots of the blocks, each as (index, serial)."""
        return [(entry.slot, entry.serial) for entry in self.entries]

    @property
    def num_ready(self) -> int:
        """Number of entries at the front that are readable."""
        for number, entry in enumerate(self.entries):
            if not entry.ready:
                return number
        return len(self.entries)


@dataclass(slots=True)
class Hold:
    """Hold of a prompt that is handed over: none of its blocks is evicted before the hold ends.

    Attributes:
        entries: Blocks by serial; some may be being written.
        until_s: Time at which the hold ends by itself.
        num_readers: Number of decode legs that are to read the blocks.
        have_read: Numbers of the legs, from 0 on, that no longer need the hold.
    """

    entries: dict[int, IndexEntry]
    until_s: float
    num_readers: int = 1
    have_read: set[int] = field(default_factory=set)


class Owned:
    """Leases and reservations of one owner, which end with that owner."""

    __slots__ = ("lease_ids", "serials")

    def __init__(self) -> None:
        self.lease_ids: set[int] = set()
        self.serials: set[int] = set()
