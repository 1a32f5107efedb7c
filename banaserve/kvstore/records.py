"""The records that the index keeps: a key's block, a lease, what an owner holds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(slots=True)
class Counters:
    """What has happened; outlives the index of one pool geometry."""

    hits: int = 0
    misses: int = 0
    evictions: int = 0
    commits: int = 0


class Grant(NamedTuple):
    """A lease and the slots that it covers, each as (index, serial)."""

    lease_id: int
    slots: list[tuple[int, int]]


class Entry:
    """One key's block. READY once every part is committed, WRITING until then."""

    __slots__ = (
        "ended_parts",
        "failed",
        "key",
        "last_used",
        "num_leases",
        "num_parts",
        "owner",
        "parent",
        "queued",
        "ready",
        "serial",
        "slot",
    )

    def __init__(
        self, key: bytes, parent: bytes | None, slot: int, serial: int, owner: int, num_parts: int
    ) -> None:
        self.key = key
        self.parent = parent
        self.slot = slot
        self.serial = serial
        self.owner = owner
        self.num_parts = num_parts
        self.ended_parts = 0
        self.failed = False
        self.ready = False
        self.num_leases = 0
        self.last_used = 0
        self.queued = False


class HeldLease(NamedTuple):
    owner: int
    entries: list[Entry]


class Owned:
    """What ends with one owner."""

    __slots__ = ("lease_ids", "serials")

    def __init__(self) -> None:
        self.lease_ids: set[int] = set()
        self.serials: set[int] = set()
