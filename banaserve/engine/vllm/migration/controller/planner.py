"""Plan of moves for a request, given what is remote already, and their sizes. Pure."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from banaserve.engine.vllm.compat.config import VllmConfig
from banaserve.engine.vllm.migration.types import ModelGeometry
from banaserve.engine.vllm.migration.units.base import MigrationUnit, layers_left, overlap
from banaserve.engine.vllm.migration.worker_api import KvStatus
from banaserve.errors import MigrationError
from banaserve.kvstore.sizes import format_size


@dataclass(frozen=True, slots=True)
class RemoteUnit:
    """A unit that runs beside another instance, ``at``."""

    unit_id: str
    modules: MigrationUnit
    at: str


@dataclass(frozen=True, slots=True)
class MoveOut:
    """Move modules that are at home."""

    modules: MigrationUnit


@dataclass(frozen=True, slots=True)
class Relocate:
    """Move a unit that is away on to another instance; ``at`` is where it is."""

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
    """Steps after which ``wanted`` runs beside ``target``.

    Args:
        away: Units of the same host that are not at home.
        moving: What migrations of the host that have not ended are about, by their ids.

    Returns:
        At least one step; what is at ``target`` already stays.

    Raises:
        MigrationError: With the reason why it cannot be done.
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
    """Steps after which ``wanted``, or everything, is at home.

    Raises:
        MigrationError: Nothing of it is away, it moves, or a unit is only partly named.
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
"""A guest's process beside weights and KV: what it does not share with its parent, on CPU."""
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_MAX_HEADER_BYTES = 64 << 20
_ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}

AvailableBytes = Callable[[str], int]
"""Memory that is available to an instance's guests, by the instance's id."""


class ModelFacts(NamedTuple):
    """What the coordinator knows of the model; bytes as the engines hold them."""

    num_layers: int
    num_kv_heads: int
    layer_weight_bytes: int
    num_experts: int = 0

    @property
    def shape(self) -> ModelGeometry:
        return ModelGeometry(self.num_layers, self.num_kv_heads, self.num_experts)


def model_facts(config: VllmConfig) -> ModelFacts:
    """Of the model that ``config`` serves."""
    model = config.model_config
    layers = model.get_num_layers(config.parallel_config)
    element_bytes = model.dtype.itemsize
    weights = _checkpoint_layer_bytes(Path(model.model), element_bytes)
    if weights is None:
        # Attention and a gated MLP of four times the width: an upper bound for dense families.
        weights = 16 * model.get_hidden_size() ** 2 * element_bytes
    num_kv_heads = model.get_num_kv_heads(config.parallel_config)
    return ModelFacts(layers, num_kv_heads, weights, model.get_num_experts())


def weight_bytes(modules: MigrationUnit, facts: ModelFacts) -> int:
    """Weights that a guest has to load."""
    return modules.weight_bytes(facts.layer_weight_bytes)


def kv_bytes(modules: MigrationUnit, facts: ModelFacts, kv: KvStatus) -> int:
    """KV of the pool that the host started with: the most that a guest has to hold."""
    return round(modules.kv_pages(facts.num_kv_heads) * kv.page_bytes) * kv.num_blocks


def num_bytes(modules: MigrationUnit, facts: ModelFacts, kv: KvStatus) -> int:
    """Weights and KV, as above."""
    return weight_bytes(modules, facts) + kv_bytes(modules, facts, kv)


def check_room(
    modules: MigrationUnit,
    target: str,
    facts: ModelFacts,
    kv: KvStatus,
    available: AvailableBytes,
    num_ranks: int = 1,
) -> int:
    """Bytes that the modules take beside ``target``.

    Args:
        num_ranks: Of their host: a guest has a process for each.

    Raises:
        MigrationError: It has no room for them.
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
    """All instances share this machine's memory."""
    return int(psutil.virtual_memory().available)


def _checkpoint_layer_bytes(folder: Path, element_bytes: int) -> int | None:
    """Weights of the largest decoder layer, as loaded; None where the files do not say."""
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
    """Floating-point weights are loaded in the engine's type, quantised ones as they are."""
    start, end = entry["data_offsets"]
    stored = _ELEMENT_BYTES.get(entry["dtype"])
    return (end - start) * element_bytes // stored if stored else end - start
