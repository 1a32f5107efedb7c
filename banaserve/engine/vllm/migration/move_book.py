"""The moves of one host: those under way, and the last of those that are over."""

from __future__ import annotations

from collections.abc import Iterator

from banaserve.engine.vllm.migration.move import Move
from banaserve.errors import MigrationError

KEPT = 32
"""Moves that are over and can still be asked about."""


class MoveBook:
    """Keeps moves by id, in the order in which they began."""

    def __init__(self) -> None:
        self._moves: dict[str, Move] = {}

    def __iter__(self) -> Iterator[Move]:
        return iter(list(self._moves.values()))

    def add(self, move: Move) -> None:
        """Enter a move that begins, and forget the oldest of those that are over.

        Raises:
            MigrationError: Its id is taken.
        """
        if move.move_id in self._moves:
            raise MigrationError(f"there was a move {move.move_id} already: name another")
        for old in [one for one in self if one.is_over][:-KEPT]:
            del self._moves[old.move_id]
        self._moves[move.move_id] = move

    def get(self, move_id: str) -> Move:
        """A move by its id.

        Raises:
            MigrationError: There is none, or it has been over for long.
        """
        found = self._moves.get(move_id)
        if found is None:
            raise MigrationError(f"there is no move {move_id}")
        return found
