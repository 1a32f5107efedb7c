"""Which KV blocks have been written, and which of them since a copy was taken."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

BlockIds = Sequence[int] | npt.NDArray[np.int64]
_Marks = npt.NDArray[np.bool_]


class WrittenBlocks:
    """Marked by the engine's thread, read by the threads that copy.

    A step marks its blocks before it writes them. A copy taken in between would hold old bytes
    and the mark would be gone, so marks of the step under way count only once it has ended.

    Every step of an engine pays for this, moves or none, so a mark keeps the array that it was
    given, and only the end of the step looks into it.

    Args:
        num_blocks: Their ids are smaller.
    """

    def __init__(self, num_blocks: int) -> None:
        self._lock = threading.Lock()
        self._all: _Marks = np.zeros(num_blocks, np.bool_)
        self._in_step: list[BlockIds] = []
        self._watches: list[Watch] = []

    def mark(self, blocks: BlockIds) -> None:
        """Blocks that the step under way writes to; repeated ids do no harm."""
        with self._lock:
            self._in_step.append(blocks)

    def step_ended(self) -> None:
        """All writes marked so far are done."""
        with self._lock:
            for blocks in self._in_step:
                if len(blocks):
                    self._all[blocks] = True
                    for watch in self._watches:
                        watch.pending[blocks] = True
            self._in_step.clear()

    def forget(self) -> None:
        """No block holds anything that is worth copying any more."""
        with self._lock:
            self._all[:] = False
            self._in_step.clear()
            for watch in self._watches:
                watch.pending[:] = False

    def watch(self) -> Watch:
        """A view of its own, in which every block ever written is still to copy."""
        with self._lock:
            watch = Watch(self, self._all.copy())
            self._watches.append(watch)
            return watch

    def end(self, watch: Watch) -> None:
        """Stop keeping a view up to date."""
        with self._lock:
            if watch in self._watches:
                self._watches.remove(watch)

    def take(self, watch: Watch) -> list[int]:
        """The blocks of a view that are to copy, ascending; the view is empty then."""
        with self._lock:
            taken: list[int] = np.flatnonzero(watch.pending).tolist()
            watch.pending[:] = False
            return taken

    def give_back(self, watch: Watch, blocks: BlockIds) -> None:
        """A copy of taken blocks has failed: they are still to copy."""
        with self._lock:
            if len(blocks):
                watch.pending[blocks] = True

    def count(self, watch: Watch) -> int:
        with self._lock:
            return int(np.count_nonzero(watch.pending))

    def ids(self) -> list[int]:
        """All that have been written, those of the step under way included; ascending."""
        with self._lock:
            found = self._all.copy()
            for blocks in self._in_step:
                if len(blocks):
                    found[blocks] = True
        written: list[int] = np.flatnonzero(found).tolist()
        return written

    def __len__(self) -> int:
        return len(self.ids())


class Watch:
    """One copier's view of what it has still to copy; its owner is ``WrittenBlocks``."""

    def __init__(self, owner: WrittenBlocks, pending: _Marks) -> None:
        self._owner = owner
        self.pending = pending

    def take(self) -> list[int]:
        return self._owner.take(self)

    def give_back(self, blocks: BlockIds) -> None:
        self._owner.give_back(self, blocks)

    def end(self) -> None:
        self._owner.end(self)

    def __len__(self) -> int:
        return self._owner.count(self)
