"""Which KV blocks have been written, and which of them since a copy was taken."""

from __future__ import annotations

import threading
from collections.abc import Iterable


class WrittenBlocks:
    """Marked by the engine's thread, read by the threads that copy.

    A step marks its blocks before it writes them. A copy taken in between would hold old bytes
    and the mark would be gone, so marks of the step under way count only once it has ended.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._all: set[int] = set()
        self._in_step: set[int] = set()
        self._watches: list[Watch] = []

    def mark(self, blocks: Iterable[int]) -> None:
        """Blocks that the step under way writes to."""
        with self._lock:
            self._in_step.update(blocks)

    def step_ended(self) -> None:
        """All writes marked so far are done."""
        with self._lock:
            self._all |= self._in_step
            for watch in self._watches:
                watch.pending |= self._in_step
            self._in_step.clear()

    def forget(self) -> None:
        """No block holds anything that is worth copying any more."""
        with self._lock:
            self._all.clear()
            self._in_step.clear()
            for watch in self._watches:
                watch.pending.clear()

    def watch(self) -> Watch:
        """A view of its own, in which every block ever written is still to copy."""
        with self._lock:
            watch = Watch(self, set(self._all))
            self._watches.append(watch)
            return watch

    def end(self, watch: Watch) -> None:
        """Stop keeping a view up to date."""
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)

    def take(self, watch: Watch) -> list[int]:
        """The blocks of a view that are to copy, sorted; the view is empty then."""
        with self._lock:
            taken = sorted(watch.pending)
            watch.pending.clear()
            return taken

    def give_back(self, watch: Watch, blocks: Iterable[int]) -> None:
        """A copy of taken blocks has failed: they are still to copy."""
        with self._lock:
            watch.pending.update(blocks)

    def count(self, watch: Watch) -> int:
        with self._lock:
            return len(watch.pending)

    def __len__(self) -> int:
        with self._lock:
            return len(self._all | self._in_step)


class Watch:
    """One copier's view of what it has still to copy; its owner is ``WrittenBlocks``."""

    def __init__(self, owner: WrittenBlocks, pending: set[int]) -> None:
        self._owner = owner
        self.pending = pending

    def take(self) -> list[int]:
        return self._owner.take(self)

    def give_back(self, blocks: Iterable[int]) -> None:
        self._owner.give_back(self, blocks)

    def end(self) -> None:
        self._owner.end(self)

    def __len__(self) -> int:
        return self._owner.count(self)
