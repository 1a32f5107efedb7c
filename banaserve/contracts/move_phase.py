"""Sizes of the model, and the phases of a move with the transitions allowed between them."""

from __future__ import annotations

from enum import Enum

import msgspec

from banaserve.base.errors import MigrationError


class ModelGeometry(msgspec.Struct, frozen=True):
    """Sizes of the model that units are checked against.

    Attributes:
        num_kv_heads: Number of KV heads of this worker.
        num_experts: Number of routed experts of each layer that has any; 0 in a dense model.
    """

    num_layers: int
    num_kv_heads: int
    num_experts: int = 0


class MovePhase(Enum):
    """Phase of a move.

    Until COMMITTED the source serves and is unchanged, so every phase before COMMITTED can end in
    ABORTED or FAILED at no cost. A committed move can only be undone by another move. A move that
    is committed without COPYING copies everything at a standstill.
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
"""Phases in which the source still serves and the move can be aborted."""


def check_step(move_id: str, before: MovePhase, after: MovePhase) -> None:
    """Refuse a change of phase that is not in ``ALLOWED``.

    Raises:
        MigrationError: ``after`` may not follow ``before``.
    """
    if after not in ALLOWED[before]:
        possible = ", ".join(sorted(phase.value for phase in ALLOWED[before])) or "nothing"
        raise MigrationError(
            f"move {move_id} is {before.value} and cannot become {after.value}; "
            f"{possible} may follow"
        )
