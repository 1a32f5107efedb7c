"""Values that pass between the daemon's thread and Mooncake's thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from banaserve.kvstore.tiers.interface import BlockBytes, TierOutcome


@dataclass(eq=False, slots=True)
class MooncakeJob:
    """A load or a store on its way.

    Attributes:
        is_store: Whether bytes go from ``memory`` to Mooncake.
        deadline_s: On the monotonic clock: when it fails if it has not ended.
        slot: In the staging, once it has one.
        outcome: Once it has ended for its caller; the slot may still be in use.
    """

    ticket: int
    key: bytes
    memory: BlockBytes
    is_store: bool
    started_s: float
    deadline_s: float
    slot: int | None = None
    outcome: TierOutcome | None = None


class AskedKeys(NamedTuple):
    """Which of ``keys`` are there; ``codes`` is None until answered and where that failed."""

    keys: list[bytes]
    codes: list[int] | None


class Removed(NamedTuple):
    """The store is to forget ``keys``, or was asked to."""

    keys: list[bytes]


class Health(NamedTuple):
    """Whether the store can be used from here on; ``problem`` says why not."""

    available: bool
    problem: str


Order = MooncakeJob | AskedKeys | Removed
Event = MooncakeJob | AskedKeys | Removed | Health
