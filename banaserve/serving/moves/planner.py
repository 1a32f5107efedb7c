"""Plan of moves for a request, given the units that are away already, and the moves' sizes."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from banaserve.base.errors import MigrationError
from banaserve.contracts.move_phase import ModelGeometry
from banaserve.engine.compat.config import VllmConfig, element_bytes
from banaserve.kvstore.sizes import format_size
from banaserve.migration.units.base import MigrationUnit, layers_left, overlap
from banaserve.migration.worker_api import KvStatus


@dataclass(frozen=True, slots=True)
class RemoteUnit:
    """Unit that runs beside another instance, ``at``."""

    unit_id: str
    modules: MigrationUnit
    at: str


@dataclass(frozen=True, slots=True)
class MoveOut:
    """Move of modules that are at home to another instance."""

    modules: MigrationUnit


@dataclass(frozen=True, slots=True)
class Relocate:
    """Move of a unit that is away, now beside ``at``, on to another instance."""

    unit_id: str
    modules: MigrationUnit
    at: str


@dataclass(frozen=True, slots=True)
class BringBack:
    unit_id: str
    modules: MigrationUnit
    at: str


Op = MoveOut | Relocate | BringBack


def plan_move(
    wanted: MigrationUnit,
    target: str,
    shape: ModelGeometry,
    away: Sequence[RemoteUnit],
    moving: Mapping[str, Sequence[MigrationUnit]],
) -> list[Op]:
    """Plan the steps after which ``wanted`` runs beside ``target``.

    Args:
        away: Units of the same host that are not at home.
        moving: Modules of the host's migrations that have not ended, by the migrations' ids.

    Returns:
        At least one step; units that are at ``target`` already stay.

    Raises:
        MigrationError: The move is impossible; the message gives the reason.
    """
    wanted.check(shape)
    _check_not_moving(wanted, moving)
    steps: list[Op] = []
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
        steps.append(Relocate(unit.unit_id, unit.modules, unit.at))
    steps += [MoveOut(modules) for modules in wanted.of_cells(rest)]
    if not steps:
        raise MigrationError(f"{wanted} run beside {target} already")
    _keep_one_layer([*(s.modules for s in steps), *(u.modules for u in away)], shape)
    return steps


def plan_return(
    wanted: MigrationUnit | None,
    away: Sequence[RemoteUnit],
    moving: Mapping[str, Sequence[MigrationUnit]],
) -> list[BringBack]:
    """Plan the steps after which ``wanted``, or every unit if None, is at home.

    Raises:
        MigrationError: None of ``wanted`` is away, a part of it is moving, or it names only a part
            of a unit.
    """
    found = [u for u in away if wanted is None or overlap(wanted, u.modules) is not None]
    if not found:
        raise MigrationError(f"nothing of {wanted} is away" if wanted else "nothing is away")
    for unit in found:
        _check_not_moving(unit.modules, moving)
        if wanted is not None and not wanted.covers(unit.modules):
            raise MigrationError(f"{_where(unit)} as one unit: return all of it")
    return [BringBack(unit.unit_id, unit.modules, unit.at) for unit in found]


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


GUEST_BYTES = 160 << 20
"""Memory of a guest's process besides weights and KV, in bytes: its pages that are not shared with
its parent, on CPU."""
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_MAX_HEADER_BYTES = 64 << 20
_ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

AvailableBytes = Callable[[str], int]
"""Function from an instance's id to the memory available to guests beside it, in bytes."""


class ModelFacts(NamedTuple):
    """Facts of the model for the coordinator; bytes as the engines hold them."""

    num_layers: int
    num_kv_heads: int
    layer_weight_bytes: int
    num_experts: int = 0

    @property
    def shape(self) -> ModelGeometry:
        return ModelGeometry(self.num_layers, self.num_kv_heads, self.num_experts)


def model_facts(config: VllmConfig) -> ModelFacts:
    """Return the facts of the model that ``config`` serves."""
    model = config.model_config
    layers = model.get_num_layers(config.parallel_config)
    number_bytes = element_bytes(model)
    weights = _checkpoint_layer_bytes(Path(model.model), number_bytes)
    if weights is None:
        # Attention and a gated MLP of four times the width: an upper bound for dense families.
        weights = 16 * model.get_hidden_size() ** 2 * number_bytes
    num_kv_heads = model.get_num_kv_heads(config.parallel_config)
    return ModelFacts(layers, num_kv_heads, weights, model.get_num_experts())


def weight_bytes(modules: MigrationUnit, facts: ModelFacts) -> int:
    """Return the bytes of the weights that a guest has to load."""
    return modules.weight_bytes(facts.layer_weight_bytes)


def kv_bytes(modules: MigrationUnit, facts: ModelFacts, kv: KvStatus) -> int:
    """Return the KV bytes of the pool that the host started with: a guest's maximum."""
    return round(modules.kv_pages(facts.num_kv_heads) * kv.page_bytes) * kv.num_blocks


def num_bytes(modules: MigrationUnit, facts: ModelFacts, kv: KvStatus) -> int:
    """Return the sum of ``weight_bytes`` and ``kv_bytes``."""
    return weight_bytes(modules, facts) + kv_bytes(modules, facts, kv)


def check_room(
    modules: MigrationUnit,
    target: str,
    facts: ModelFacts,
    kv: KvStatus,
    available: AvailableBytes,
    num_ranks: int = 1,
) -> int:
    """Return the bytes that the modules take beside ``target``, if it has room for them.

    Args:
        num_ranks: Number of tensor-parallel ranks of the host: a guest has a process for each.

    Raises:
        MigrationError: The target has no room for the modules.
    """
    needed = num_bytes(modules, facts, kv)
    there, guest = available(target), num_ranks * GUEST_BYTES
    if needed + guest > there:
        raise MigrationError(
            f"{target} has no room for {modules}: they take {format_size(needed)} and a guest "
            f"{format_size(guest)}, {format_size(max(there, 0))} are available there: move "
            "less, or serve with a smaller --kv-cache-memory-bytes"
        )
    return needed


def machine_available_bytes(_: str) -> int:
    """Return the available memory of this machine, in bytes, which all instances share."""
    return int(psutil.virtual_memory().available)


def _checkpoint_layer_bytes(folder: Path, element_bytes: int) -> int | None:
    """Return the bytes of the largest decoder layer, as loaded; None if the files do not say."""
    by_layer: dict[str, int] = {}
    try:
        for path in folder.glob("*.safetensors"):
            for name, entry in _tensors(path):
                if (found := _LAYER.search(name)) is not None:
                    size = _loaded_bytes(entry, element_bytes)
                    by_layer[found[1]] = by_layer.get(found[1], 0) + size
    except (OSError, ValueError, KeyError, TypeError, struct.error):
        return None
    return max(by_layer.values(), default=None)


def _tensors(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    with path.open("rb") as file:
        (length,) = struct.unpack("<Q", file.read(8))
        if length > _MAX_HEADER_BYTES:
            raise ValueError(f"{path}: header of {length} bytes")
        header: dict[str, Any] = json.loads(file.read(length))
    header.pop("__metadata__", None)
    yield from header.items()


def _loaded_bytes(entry: dict[str, Any], element_bytes: int) -> int:
    """Return a tensor's bytes as loaded: floats in the engine's type, quantised ones as stored."""
    start, end = entry["data_offsets"]
    stored = _ELEMENT_BYTES.get(entry["dtype"])
    return (end - start) * element_bytes // stored if stored else end - start
