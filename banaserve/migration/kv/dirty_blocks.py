"""Sets of KV blocks: those in a guest, those written since a copy was taken, and their runs."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

BlockIds = Sequence[int] | npt.NDArray[np.int64]
_Marks = npt.NDArray[np.bool_]
Written = tuple[BlockIds, BlockIds]
"""Blocks that a step writes to, ids may be repeated; those of them whose last slot is written."""


def spans(numbers: Iterable[int]) -> list[tuple[int, int]]:
    """Join neighbouring numbers: return ``(first, count)`` of each run, ascending."""
    found: list[tuple[int, int]] = []
    for number in sorted(numbers):
        if found and sum(found[-1]) == number:
            found[-1] = (found[-1][0], found[-1][1] + 1)
        else:
            found.append((number, 1))
    return found


class RemoteBlocks:
    """The set of KV blocks that are away, in a guest.

    Only full blocks leave, so a block is written again only when its id gets another content. The
    first write to a block therefore brings it home without a copy: the guest's bytes are obsolete.

    Args:
        num_blocks: Number of blocks; every block id is smaller.
        on_home: Called with the blocks that a write brings home, before the write.
    """

    def __init__(
        self, num_blocks: int, on_home: Callable[[npt.NDArray[np.int64]], None] | None = None
    ) -> None:
        self._lock = threading.RLock()
        self._away = np.zeros(num_blocks, np.bool_)
        self._on_home = on_home

    def set(self, blocks: BlockIds) -> None:
        """Record that exactly these blocks are away."""
        with self._lock:
            self._away[:] = False
            if len(blocks):
                self._away[blocks] = True

    def mark_local(self, blocks: BlockIds) -> None:
        """Bring home blocks that the host is about to write; wait for ``holding`` to end."""
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
        """Return, in the shape of ``blocks``, whether each block is away."""
        with self._lock:
            found: npt.NDArray[np.bool_] = self._away[blocks]
        return found

    @contextlib.contextmanager
    def holding(self, blocks: BlockIds) -> Iterator[list[int]]:
        """Yield the members of ``blocks`` that are away; none comes home within the context."""
        with self._lock:
            ids = np.asarray(blocks, np.int64)
            yield ids[self._away[ids]].tolist() if len(ids) else []

    def ids(self) -> list[int]:
        """Return the ids of all blocks that are away, ascending."""
        with self._lock:
            away: list[int] = np.flatnonzero(self._away).tolist()
        return away

    def __len__(self) -> int:
        return int(np.count_nonzero(self._away))


class DirtyBlockTracker:
    """Record of written blocks, marked by the engine's thread and read by the copying threads.

    A step marks its blocks before it writes them. A copy taken in between would hold old bytes
    and clear the mark, so marks of the step under way count only once the step has ended.

    Every step of an engine pays for the marks, even if nothing is moving, so a mark only keeps the
    given array, and the array is read at the end of the step. The engine does not wait for what a
    GPU knows of its step (``mark_later``), unless blocks that are away have to come home first.
    """

    def __init__(self, num_blocks: int) -> None:
        self._lock = threading.Lock()
        self._all: _Marks = np.zeros(num_blocks, np.bool_)
        self._full: _Marks = np.zeros(num_blocks, np.bool_)
        self._in_step: list[BlockIds] = []
        self._filled_in_step: list[BlockIds] = []
        self._unread: list[Callable[[], Written]] = []
        self._loaded: list[BlockIds] = []
        self._watches: list[Watch] = []
        self._away: list[RemoteBlocks] = []

    def mark(self, blocks: BlockIds, filled: BlockIds = ()) -> None:
        """Mark the blocks that the step under way writes to; ids may be repeated.

        Args:
            filled: Blocks among them whose last slot is written.
        """
        with self._lock:
            self._in_step.append(blocks)
            self._filled_in_step.append(filled)
            self._mark_local(blocks)

    def mark_later(self, read: Callable[[], Written]) -> None:
        """Mark what ``read`` returns; it may wait for the GPU, and is called when needed."""
        with self._lock:
            self._unread.append(read)
            if self._away:
                self._read_marks()

    def _read_marks(self) -> None:
        unread, self._unread = self._unread, []
        for read in unread:
            blocks, filled = read()
            self._in_step.append(blocks)
            self._filled_in_step.append(filled)
            self._mark_local(blocks)

    def mark_loaded(self, blocks: BlockIds) -> None:
        """Mark blocks fetched as a whole; a block fetched in part gets tokens in the same step."""
        with self._lock:
            self._loaded.append(blocks)
            self._mark_local(blocks)

    def _mark_local(self, blocks: BlockIds) -> None:
        for away in self._away:
            away.mark_local(blocks)

    def step_ended(self) -> None:
        """Count the marks made so far: all their writes are done."""
        with self._lock:
            self._read_marks()
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
        """Forget all writes: no block holds anything worth copying any more."""
        with self._lock:
            self._all[:] = self._full[:] = False
            self._unread.clear()
            for marked in (self._loaded, self._in_step, self._filled_in_step):
                marked.clear()
            for watch in self._watches:
                watch.pending[:] = False

    def watch(self) -> Watch:
        """Return a new view, in which every block ever written is still to be copied."""
        with self._lock:
            watch = Watch(self._all.copy(), self._lock, self._watches)
            self._watches.append(watch)
            return watch

    def ids(self) -> list[int]:
        """Return all blocks that have been written, ascending, including the step under way."""
        with self._lock:
            self._read_marks()
            found = self._all.copy()
            for blocks in (*self._loaded, *self._in_step):
                if len(blocks):
                    found[blocks] = True
        written: list[int] = np.flatnonzero(found).tolist()
        return written

    def full(self) -> list[int]:
        """Return the blocks written up to their last slot; no token is added to these blocks."""
        with self._lock:
            full: list[int] = np.flatnonzero(self._full).tolist()
        return full

    def follow(self, away: RemoteBlocks) -> None:
        """Bring blocks of ``away`` home whenever they are about to be written."""
        with self._lock:
            self._away.append(away)

    def unfollow(self, away: RemoteBlocks) -> None:
        with self._lock:
            if away in self._away:
                self._away.remove(away)

    def __len__(self) -> int:
        return len(self.ids())


class Watch:
    """A copier's view of the blocks still to be copied, updated by a ``DirtyBlockTracker``.

    Args:
        others: The tracker's views, with this one until it has ended.
    """

    def __init__(self, pending: _Marks, lock: threading.Lock, others: list[Watch]) -> None:
        self.pending = pending
        self._lock = lock
        self._others = others

    def take(self) -> list[int]:
        """Return the blocks that are still to be copied, ascending, and empty the view."""
        with self._lock:
            taken: list[int] = np.flatnonzero(self.pending).tolist()
            self.pending[:] = False
        return taken

    def end(self) -> None:
        """Stop the updates."""
        with self._lock:
            if self in self._others:
                self._others.remove(self)

    def __len__(self) -> int:
        with self._lock:
            return int(np.count_nonzero(self.pending))
