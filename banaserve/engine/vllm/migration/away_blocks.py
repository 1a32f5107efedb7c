"""Which KV blocks of some layers lie in a guest, where the others lie at home."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import numpy.typing as npt

BlockIds = Sequence[int] | npt.NDArray[np.int64]


class AwayBlocks:
    """Blocks leave full, so none of them is written again until its id has another content.

    So the first write to a block brings it home without a copy: what the guest has of it is of no
    use to anybody.

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

    def leave(self, blocks: BlockIds) -> None:
        """These, and no others, are away."""
        with self._lock:
            self._away[:] = False
            if len(blocks):
                self._away[blocks] = True

    def come_home(self, blocks: BlockIds) -> None:
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
