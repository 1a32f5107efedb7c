"""The phases of a move, and which may follow which."""

from __future__ import annotations

from enum import Enum

from banaserve.errors import MigrationError


class Phase(Enum):
    """Where a move stands.

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


_ENDS = frozenset({Phase.ABORTED, Phase.FAILED})

ALLOWED: dict[Phase, frozenset[Phase]] = {
    Phase.PREPARING: frozenset({Phase.PREPARED}) | _ENDS,
    Phase.PREPARED: frozenset({Phase.COPYING, Phase.COMMITTED}) | _ENDS,
    Phase.COPYING: frozenset({Phase.COPIED}) | _ENDS,
    Phase.COPIED: frozenset({Phase.COPYING, Phase.COMMITTED}) | _ENDS,
    Phase.COMMITTED: frozenset({Phase.FREEING}),
    Phase.FREEING: frozenset({Phase.FREED, Phase.FAILED}),
    Phase.FREED: frozenset(),
    Phase.ABORTED: frozenset(),
    Phase.FAILED: frozenset(),
}

OPEN = frozenset({Phase.PREPARING, Phase.PREPARED, Phase.COPYING, Phase.COPIED})
"""Phases in which the source still serves and the move may yet be given up."""


def check_step(move_id: str, before: Phase, after: Phase) -> None:
    """Refuse a step that the table does not know.

    Raises:
        MigrationError: ``after`` may not follow ``before``.
    """
    if after not in ALLOWED[before]:
        possible = ", ".join(sorted(phase.value for phase in ALLOWED[before])) or "nothing"
        raise MigrationError(
            f"move {move_id} is {before.value} and cannot become {after.value}; "
            f"{possible} may follow"
        )
