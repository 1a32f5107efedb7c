"""Values that pass between the daemon's thread and Mooncake's thread."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from banaserve.kvstore.tiers.interface import BlockBytes, TierOutcome


@dataclass(eq=False, slots=True)
class MooncakeJob:
    """Load or store under way.

    Attributes:
        is_store: True if bytes go from ``memory`` to Mooncake, False for a load.
        deadline_s: Time on the monotonic clock at which the job fails if it has not ended.
        slot: Slot in the staging memory; None until one is assigned.
        outcome: Outcome; None until the job has ended for its caller. The slot may still be in use
            after that.
    """

    ticket: int
    key: bytes
    memory: BlockBytes
    is_store: bool
    deadline_s: float
    slot: int | None = None
    outcome: TierOutcome | None = None


class AskedKeys(NamedTuple):
    """Question which ``keys`` the store has; ``codes`` is None until the answer and on failure."""

    keys: list[bytes]
    codes: list[int] | None


class Removed(NamedTuple):
    """Order to remove ``keys`` from the store, and the event that this was done."""

    keys: list[bytes]


class Health(NamedTuple):
    """Health of the store from now on; ``problem`` says why it is not available."""

    available: bool
    problem: str


Order = MooncakeJob | AskedKeys | Removed
Event = MooncakeJob | AskedKeys | Removed | Health
