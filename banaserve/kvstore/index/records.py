"""Records of the index: the block of a key, a lease, and a hold."""

from __future__ import annotations

from dataclasses import dataclass, field

MAX_SERIAL = 2**60
HOLD_S = 300.0
"""Time in seconds after which a hold ends by itself: the front door that would end it has died."""


@dataclass(eq=False, slots=True)
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
        kept_until_s: Second of the store's clock until which requests asked to keep the block; 0 if
            none did.
    """

    key: bytes
    parent: bytes | None
    slot: int
    serial: int
    tenant: bytes
    owner: int = 0
    num_parts: int = 0
    ended_parts: int = 0
    failed: bool = False
    ready: bool = False
    promoting: bool = False
    dropped: bool = False
    checksum: int = 0
    num_leases: int = 0
    num_holds: int = 0
    num_pins: int = 0
    last_used: int = 0
    kept_until_s: int = 0


class SlotWatcher:
    """Observer of slot changes, called within an operation; it must not call the index.

    This base class ignores all of them.
    """

    def became_pending(self, entry: IndexEntry) -> None:
        """Note that a tier or a push is about to fill the slot."""

    def became_ready(self, entry: IndexEntry) -> None:
        """Note that the slot may be leased."""

    def failed(self, entry: IndexEntry) -> None:
        """Note that the block in the slot is lost to its leases."""

    def became_free(self, entry: IndexEntry) -> None:
        """Note that the slot is no longer in use."""


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

    ``entries`` are its blocks by serial, some perhaps being written. It ends by itself at
    ``until_s``, or when as many legs as ``num_readers`` are in ``have_read``.
    """

    entries: dict[int, IndexEntry]
    until_s: float
    num_readers: int = 1
    have_read: set[int] = field(default_factory=set)
