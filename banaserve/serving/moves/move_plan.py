"""Plan of the moves for a request, given the units that are away already. Pure functions."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain

from banaserve.base.errors import MigrationError
from banaserve.contracts.move_phase import ModelGeometry
from banaserve.migration.units.base import MigrationUnit, layers_left, overlap


@dataclass(frozen=True, slots=True)
class RemoteUnit:
    """Unit that runs beside another instance, ``at``; see ``UnitStatus``."""

    unit_id: str
    modules: MigrationUnit
    at: str
    guest_id: str = ""
    epoch: int = 0
    num_older_blocks: int | None = None


@dataclass(frozen=True, slots=True)
class UnitMove:
    """Move of one unit, to another instance or home.

    Attributes:
        unit_id: Id of a unit that is away; empty for modules that are at home.
    """

    modules: MigrationUnit
    unit_id: str = ""


def plan_move(
    wanted: MigrationUnit,
    target: str,
    shape: ModelGeometry,
    away: Sequence[RemoteUnit],
    moving: Mapping[str, Sequence[MigrationUnit]],
) -> list[UnitMove]:
    """Plan the moves after which ``wanted`` runs beside ``target``.

    Args:
        away: Units of the same host that are not at home.
        moving: Modules of the host's migrations that have not ended, by the migrations' ids.

    Returns:
        At least one move; units that are at ``target`` already stay.

    Raises:
        MigrationError: The move is impossible; the message gives the reason.
    """
    wanted.check(shape)
    _check_not_moving(wanted, moving)
    steps: list[UnitMove] = []
    rest = wanted.cells()
    for unit in away:
        if overlap(wanted, unit.modules) is None:
            continue
        if unit.modules.kind != wanted.kind:
            raise MigrationError(f"{_where(unit)}: return them before you move {wanted}")
        held = unit.modules.cells()
        rest -= held
        if unit.at == target:
            continue
        if not held <= wanted.cells():
            raise MigrationError(f"{_where(unit)} as one unit: move all of it, or return it first")
        steps.append(UnitMove(unit.modules, unit.unit_id))
    steps += [UnitMove(modules) for modules in wanted.of_cells(rest)]
    if not steps:
        raise MigrationError(f"{wanted} run beside {target} already")
    others = [*(u.modules for u in away), *chain.from_iterable(moving.values())]
    _keep_one_layer([*(s.modules for s in steps), *others], shape)
    return steps


def plan_return(
    wanted: MigrationUnit | None,
    shape: ModelGeometry,
    away: Sequence[RemoteUnit],
    moving: Mapping[str, Sequence[MigrationUnit]],
) -> list[UnitMove]:
    """Plan the moves after which ``wanted``, or every unit if None, is at home.

    Raises:
        MigrationError: The model has no such modules, none of ``wanted`` is away, a part of it is
            moving, or it names only a part of a unit.
    """
    if wanted is not None:
        wanted.check(shape)
    found = [u for u in away if wanted is None or overlap(wanted, u.modules) is not None]
    if not found:
        raise MigrationError(f"nothing of {wanted} is away" if wanted else "nothing is away")
    for unit in found:
        _check_not_moving(unit.modules, moving)
        if wanted is not None and not wanted.covers(unit.modules):
            raise MigrationError(f"{_where(unit)} as one unit: return all of it")
    return [UnitMove(unit.modules, unit.unit_id) for unit in found]


def _check_not_moving(wanted: MigrationUnit, moving: Mapping[str, Sequence[MigrationUnit]]) -> None:
    for migration_id, others in moving.items():
        for other in others:
            if (shared := overlap(wanted, other)) is not None:
                raise MigrationError(
                    f"{shared} is on its way in migration {migration_id}: wait for it to end, or "
                    "abort it"
                )


def _keep_one_layer(modules: Iterable[MigrationUnit], shape: ModelGeometry) -> None:
    if not layers_left(modules, shape.num_layers):
        raise MigrationError("every layer would be away: keep at least one on the host")


def _where(unit: RemoteUnit) -> str:
    return f"{unit.modules} run beside {unit.at}"


MAX_TIMEOUT_S = 3600.0
_ALLOWED = {
    "shrinking": (60.0, 1e9),
    "starting": (120.0, 1e9),
    "preparing": (60.0, 20e6),
    "copying": (30.0, 25e6),
    "committing": (10.0, 100e6),
    "freeing": (10.0, 1e9),
}
"""Base time of each phase in seconds, and bytes per second on the slowest supported machine.

Building reads the checkpoint from a disk; copies go over 1 Gbit/s at worst and are repeated; a
commit copies the blocks that the last round has left.
"""


def timeout_s(phase: str, num_bytes: int) -> float:
    """Return the timeout of a phase of a move of ``num_bytes``, in seconds; at most an hour."""
    least_s, bytes_per_s = _ALLOWED[phase]
    return min(MAX_TIMEOUT_S, least_s + num_bytes / bytes_per_s)


def copies_again(dirty_before: int | None, dirty_now: int, num_times: int) -> bool:
    """Return whether to PRECOPY again: while each copy leaves less than half as many blocks.

    Args:
        dirty_before: Blocks that the previous copy left; None after the first copy.
        dirty_now: Blocks that the last copy left.
    """
    if dirty_now == 0 or num_times >= 8:
        return False
    return dirty_before is None or 2 * dirty_now < dirty_before
