"""Sets of KV blocks: those in a guest, and those written since a copy was taken."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

BlockIds = Sequence[int] | npt.NDArray[np.int64]
_Marks = npt.NDArray[np.bool_]


class RemoteBlocks:
    """Blocks leave full, so none of them is written again until its id has another content.

    So the first write to a block brings it home without a copy: what the guest has of it is of no
    use.

    Args:
        num_blocks: Their ids are smaller.
        on_home: Called with the blocks that come home by being written, before they are.
    """

    def __init__(
        self, num_blocks: int, on_home: Callable[[npt.NDArray[np.int64]], None] | None = None
    ) -> None:
        self._lock = threading.RLock()
        self._away = np.zeros(num_blocks, np.bool_)
        self._on_home = on_home

    def set(self, blocks: BlockIds) -> None:
        """These, and no others, are away."""
        with self._lock:
            self._away[:] = False
            if len(blocks):
                self._away[blocks] = True

    def mark_local(self, blocks: BlockIds) -> None:
        """These are about to be written, here. Waits for a copy that has them in its hands."""
        if not len(blocks):
            return
        with self._lock:
            home = np.unique(np.asarray(blocks, np.int64))
            home = home[self._away[home]]
            if not len(home):
                return
            self._away[home] = False
            if self._on_home is not None:
                self._on_home(home)

    def among(self, blocks: npt.NDArray[np.integer]) -> npt.NDArray[np.bool_]:
        """For each id, in any shape, whether it is away."""
        with self._lock:
            found: npt.NDArray[np.bool_] = self._away[blocks]
        return found

    @contextlib.contextmanager
    def holding(self, blocks: BlockIds) -> Iterator[list[int]]:
        """Those of ``blocks`` that are away; none of them comes home inside of it."""
        with self._lock:
            ids = np.asarray(blocks, np.int64)
            yield ids[self._away[ids]].tolist() if len(ids) else []

    def ids(self) -> list[int]:
        """Ascending."""
        with self._lock:
            away: list[int] = np.flatnonzero(self._away).tolist()
        return away

    def __len__(self) -> int:
        return int(np.count_nonzero(self._away))


class DirtyBlockTracker:
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
        self._full: _Marks = np.zeros(num_blocks, np.bool_)
        self._in_step: list[BlockIds] = []
        self._filled_in_step: list[BlockIds] = []
        self._loaded: list[BlockIds] = []
        self._watches: list[Watch] = []
        self._away: list[RemoteBlocks] = []

    def mark(self, blocks: BlockIds, filled: BlockIds = ()) -> None:
        """Blocks that the step under way writes to; repeated ids do no harm.

        Args:
            filled: Those of them whose last slot is written.
        """
        with self._lock:
            self._in_step.append(blocks)
            self._filled_in_step.append(filled)
            self._mark_local(blocks)

    def mark_loaded(self, blocks: BlockIds) -> None:
        """Blocks that are fetched as a whole; one that is not gets tokens in the same step."""
        with self._lock:
            self._loaded.append(blocks)
            self._mark_local(blocks)

    def _mark_local(self, blocks: BlockIds) -> None:
        for away in self._away:
            away.mark_local(blocks)

    def step_ended(self) -> None:
        """All writes marked so far are done."""
        with self._lock:
            for marked, is_full in (
                (self._loaded, True),
                (self._in_step, False),
                (self._filled_in_step, True),
            ):
                for blocks in marked:
                    self._count(blocks, is_full)
                marked.clear()

    def _count(self, blocks: BlockIds, is_full: bool) -> None:
        if len(blocks):
            self._all[blocks] = True
            self._full[blocks] = is_full
            for watch in self._watches:
                watch.pending[blocks] = True

    def forget(self) -> None:
        """No block holds anything that is worth copying any more."""
        with self._lock:
            self._all[:] = self._full[:] = False
            for marked in (self._loaded, self._in_step, self._filled_in_step):
                marked.clear()
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
            for blocks in (*self._loaded, *self._in_step):
                if len(blocks):
                    found[blocks] = True
        written: list[int] = np.flatnonzero(found).tolist()
        return written

    def full(self) -> list[int]:
        """Blocks whose last slot has been written since their first; no token is added to them."""
        with self._lock:
            full: list[int] = np.flatnonzero(self._full).tolist()
        return full

    def follow(self, away: RemoteBlocks) -> None:
        """Bring blocks of ``away`` home as they are written, before they are."""
        with self._lock:
            self._away.append(away)

    def unfollow(self, away: RemoteBlocks) -> None:
        with self._lock:
            if away in self._away:
                self._away.remove(away)

    def __len__(self) -> int:
        return len(self.ids())


class Watch:
    """One copier's view of what it has still to copy; its owner is ``DirtyBlockTracker``."""

    def __init__(self, owner: DirtyBlockTracker, pending: _Marks) -> None:
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
