"""Values that pass between the daemon's thread and Mooncake's thread."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass
from queue import Empty, SimpleQueue
from typing import Generic, NamedTuple, TypeVar

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
T = TypeVar("T")


class Mailbox(Generic[T]):
    """A queue from one thread to another that a selector can wait for.

    Attributes:
        fd: Readable when something lies in it.
    """

    def __init__(self) -> None:
        self.fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._queue: SimpleQueue[T] = SimpleQueue()

    @property
    def is_empty(self) -> bool:
        """Whether nothing lies in it."""
        return self._queue.empty()

    def put(self, item: T) -> None:
        """Add an item and make ``fd`` readable."""
        self._queue.put(item)
        self.knock()

    def knock(self) -> None:
        """Make ``fd`` readable."""
        os.eventfd_write(self.fd, 1)

    def take(self) -> list[T]:
        """Everything in it, in order; ``fd`` stays as it is."""
        found: list[T] = []
        with contextlib.suppress(Empty):
            while True:
                found.append(self._queue.get_nowait())
        return found

    def calm(self) -> None:
        """Make ``fd`` unreadable. Call it before ``take``, so that nothing is missed."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.fd)

    def close(self) -> None:
        """Close ``fd``."""
        os.close(self.fd)
