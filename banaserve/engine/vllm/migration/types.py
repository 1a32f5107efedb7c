"""Shape of the model that moves, and the phases of a move with those that may follow each."""

from __future__ import annotations

from enum import Enum

import msgspec

from banaserve.errors import MigrationError


class ModelGeometry(msgspec.Struct, frozen=True):
    """Sizes that units are checked against; ``num_kv_heads`` are those of this worker.

    Attributes:
        num_experts: Routed ones of each layer that has any; 0 in a dense model.
    """

    num_layers: int
    num_kv_heads: int
    num_experts: int = 0


class MovePhase(Enum):
    """Phase of a move.

    Until COMMITTED the source serves and nothing of it has changed, so every phase before it can
    end in ABORTED or FAILED at no cost. A committed move can only be followed by another move.
    One that is committed without COPYING copies everything at a standstill.
    """

    PREPARING = "preparing"
    PREPARED = "prepared"
    COPYING = "copying"
    COPIED = "copied"
    COMMITTED = "committed"
    FREEING = "freeing"
    FREED = "freed"
    ABORTED = "aborted"
    FAILED = "failed"


_ENDS = frozenset({MovePhase.ABORTED, MovePhase.FAILED})

ALLOWED: dict[MovePhase, frozenset[MovePhase]] = {
    MovePhase.PREPARING: frozenset({MovePhase.PREPARED}) | _ENDS,
    MovePhase.PREPARED: frozenset({MovePhase.COPYING, MovePhase.COMMITTED}) | _ENDS,
    MovePhase.COPYING: frozenset({MovePhase.COPIED}) | _ENDS,
    MovePhase.COPIED: frozenset({MovePhase.COPYING, MovePhase.COMMITTED}) | _ENDS,
    MovePhase.COMMITTED: frozenset({MovePhase.FREEING}),
    MovePhase.FREEING: frozenset({MovePhase.FREED, MovePhase.FAILED}),
    MovePhase.FREED: frozenset(),
    MovePhase.ABORTED: frozenset(),
    MovePhase.FAILED: frozenset(),
}

OPEN = frozenset({MovePhase.PREPARING, MovePhase.PREPARED, MovePhase.COPYING, MovePhase.COPIED})
"""Phases in which the source still serves and the move may yet be given up."""


def check_step(move_id: str, before: MovePhase, after: MovePhase) -> None:
    """Refuse a change of phase that is not in the table.

    Raises:
        MigrationError: ``after`` may not follow ``before``.
    """
    if after not in ALLOWED[before]:
        possible = ", ".join(sorted(phase.value for phase in ALLOWED[before])) or "nothing"
        raise MigrationError(
            f"move {move_id} is {before.value} and cannot become {after.value}; "
            f"{possible} may follow"
        )
