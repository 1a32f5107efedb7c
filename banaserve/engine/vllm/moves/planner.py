"""What has to move for a request, given what is away already. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from banaserve.engine.vllm.migration.modules import (
    Context,
    HeadSet,
    LayerRange,
    ModelShape,
    Modules,
    check_shape,
    overlap,
)
from banaserve.errors import MigrationError


@dataclass(frozen=True, slots=True)
class Away:
    """A unit that runs beside another instance, ``at``."""

    unit_id: str
    modules: Modules
    at: str


@dataclass(frozen=True, slots=True)
class Go:
    """Move modules that are at home."""

    modules: Modules


@dataclass(frozen=True, slots=True)
class GoOn:
    """Move a unit that is away on to another instance; ``at`` is where it is."""

    unit_id: str
    modules: Modules
    at: str


@dataclass(frozen=True, slots=True)
class GoHome:
    unit_id: str
    modules: Modules
    at: str


Op = Go | GoOn | GoHome


def plan_move(
    wanted: Modules,
    target: str,
    shape: ModelShape,
    away: Sequence[Away],
    moving: Mapping[str, Sequence[Modules]],
) -> list[Op]:
    """Steps after which ``wanted`` runs beside ``target``.

    Args:
        away: Units of the same host that are not at home.
        moving: What migrations of the host that have not ended are about, by their ids.

    Returns:
        At least one step; what is at ``target`` already stays.

    Raises:
        MigrationError: With the reason why it cannot be done.
    """
    check_shape(wanted, shape)
    _check_not_moving(wanted, moving)
    steps: list[Op] = []
    rest = _cells(wanted)
    for unit in away:
        if overlap(wanted, unit.modules) is None:
            continue
        if type(unit.modules) is not type(wanted):
            raise MigrationError(f"{_where(unit)}: return them before you move {wanted}")
        held = _cells(unit.modules)
        rest -= held
        if unit.at == target:
            continue
        if not held <= _cells(wanted):
            raise MigrationError(f"{_where(unit)} as one unit: move all of it, or return it first")
        steps.append(GoOn(unit.unit_id, unit.modules, unit.at))
    steps += [Go(modules) for modules in _modules(rest, wanted)]
    if not steps:
        raise MigrationError(f"{wanted} run beside {target} already")
    _keep_one_layer([*(s.modules for s in steps), *(u.modules for u in away)], shape)
    return steps


def plan_return(
    wanted: Modules | None, away: Sequence[Away], moving: Mapping[str, Sequence[Modules]]
) -> list[GoHome]:
    """Steps after which ``wanted``, or everything, is at home.

    Raises:
        MigrationError: Nothing of it is away, it moves, or a unit is only partly named.
    """
    found = [u for u in away if wanted is None or overlap(wanted, u.modules) is not None]
    if not found:
        raise MigrationError(f"nothing of {wanted} is away" if wanted else "nothing is away")
    for unit in found:
        _check_not_moving(unit.modules, moving)
        if wanted is not None and not _covers(wanted, unit.modules):
            raise MigrationError(f"{_where(unit)} as one unit: return all of it")
    return [GoHome(unit.unit_id, unit.modules, unit.at) for unit in found]


def num_pages(modules: Modules, num_kv_heads: int) -> float:
    """How many whole layers' KV modules take out of the pool; older blocks come and go."""
    if isinstance(modules, Context):
        return 0.0
    if isinstance(modules, LayerRange):
        return float(len(modules.layers))
    return sum(len(heads) for heads in modules.heads.values()) / num_kv_heads


def _check_not_moving(wanted: Modules, moving: Mapping[str, Sequence[Modules]]) -> None:
    for migration_id, others in moving.items():
        for other in others:
            if (shared := overlap(wanted, other)) is not None:
                raise MigrationError(
                    f"{shared} is on its way in migration {migration_id}: wait for it to end, or "
                    "abort it"
                )


def _keep_one_layer(modules: Iterable[Modules], shape: ModelShape) -> None:
    gone = {n for m in modules if isinstance(m, LayerRange) for n in m.layers}
    if len(gone) == shape.num_layers:
        raise MigrationError("every layer would be away: keep at least one on the host")


def _where(unit: Away) -> str:
    return f"{unit.modules} run beside {unit.at}"


def _covers(wanted: Modules, held: Modules) -> bool:
    if isinstance(wanted, LayerRange):
        return set(held.layers) <= set(wanted.layers)
    return isinstance(held, HeadSet) and _cells(held) <= _cells(wanted)


def _cells(modules: Modules) -> set[tuple[int, int]]:
    """Layers, or heads of layers, one by one: comparable among modules of one kind."""
    if isinstance(modules, HeadSet):
        return {(layer, head) for layer, heads in modules.heads.items() for head in heads}
    return {(layer, 0) for layer in modules.layers}


def _modules(cells: set[tuple[int, int]], like: Modules) -> list[Modules]:
    """The inverse of ``_cells``: a range for each run of neighbouring layers, or one set."""
    if not cells:
        return []
    if isinstance(like, HeadSet):
        heads: dict[int, tuple[int, ...]] = {}
        for layer, head in sorted(cells):
            heads[layer] = (*heads.get(layer, ()), head)
        return [HeadSet(heads)]
    ranges: list[tuple[int, int]] = []
    for layer, _ in sorted(cells):
        if ranges and ranges[-1][1] == layer:
            ranges[-1] = (ranges[-1][0], layer + 1)
        else:
            ranges.append((layer, layer + 1))
    return [type(like)(start, end) for start, end in ranges]
