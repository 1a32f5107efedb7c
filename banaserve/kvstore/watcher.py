"""What follows from the states of slots: the board, and freed memory."""

from __future__ import annotations

from banaserve.kvstore.board import Board
from banaserve.kvstore.pool import Pool
from banaserve.kvstore.records import Entry


class PoolWatcher:
    """Carries the index's decisions over to what clients share.

    Args:
        pool: The blocks' memory.
        board: Tells clients which slots are readable.
        poisons: Whether freed slots are overwritten.
    """

    def __init__(self, pool: Pool, board: Board, *, poisons: bool = False) -> None:
        self._pool = pool
        self._board = board
        self._poisons = poisons
        self._slot_bytes = 0

    def carve(self, slot_bytes: int) -> None:
        """The pool is cut into slots of another size; every slot is free."""
        self._slot_bytes = slot_bytes
        self._board.clear()
        if self._poisons:
            self._pool.poison(0, self._pool.num_bytes)

    def became_pending(self, entry: Entry) -> None:
        """A tier is about to fill the slot."""
        self._board.show_pending(entry.slot, entry.serial)

    def became_ready(self, entry: Entry) -> None:
        """The slot may be leased."""
        self._board.show_ready(entry.slot, entry.serial)

    def failed(self, entry: Entry) -> None:
        """The block in the slot is lost to those who lease it."""
        self._board.show_failed(entry.slot, entry.serial)

    def became_free(self, entry: Entry) -> None:
        """Nobody uses the slot any more."""
        self._board.show_free(entry.slot)
        if self._poisons:
            self._pool.poison(entry.slot * self._slot_bytes, self._slot_bytes)
