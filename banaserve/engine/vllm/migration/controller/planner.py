"""What has to move for a request, given what is away already. Pure.

How many bytes a move takes, and whether its target has room for them.
"""

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
from banaserve.engine.vllm.migration.rpc.worker_api import KvStatus
from banaserve.engine.vllm.migration.types import (
    Context,
    HeadSet,
    LayerRange,
    ModelGeometry,
    Modules,
    check_shape,
    overlap,
)
from banaserve.errors import MigrationError
from banaserve.kvstore.sizes import format_size


@dataclass(frozen=True, slots=True)
class RemoteUnit:
    """A unit that runs beside another instance, ``at``."""

    unit_id: str
    modules: Modules
    at: str


@dataclass(frozen=True, slots=True)
class MoveOut:
    """Move modules that are at home."""

    modules: Modules


@dataclass(frozen=True, slots=True)
class Relocate:
    """Move a unit that is away on to another instance; ``at`` is where it is."""

    unit_id: str
    modules: Modules
    at: str


@dataclass(frozen=True, slots=True)
class BringBack:
    unit_id: str
    modules: Modules
    at: str


Op = MoveOut | Relocate | BringBack


def plan_move(
    wanted: Modules,
    target: str,
    shape: ModelGeometry,
    away: Sequence[RemoteUnit],
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
        steps.append(Relocate(unit.unit_id, unit.modules, unit.at))
    steps += [MoveOut(modules) for modules in _modules(rest, wanted)]
    if not steps:
        raise MigrationError(f"{wanted} run beside {target} already")
    _keep_one_layer([*(s.modules for s in steps), *(u.modules for u in away)], shape)
    return steps


def plan_return(
    wanted: Modules | None, away: Sequence[RemoteUnit], moving: Mapping[str, Sequence[Modules]]
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
        if wanted is not None and not _covers(wanted, unit.modules):
            raise MigrationError(f"{_where(unit)} as one unit: return all of it")
    return [BringBack(unit.unit_id, unit.modules, unit.at) for unit in found]


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


def _keep_one_layer(modules: Iterable[Modules], shape: ModelGeometry) -> None:
    gone = {n for m in modules if isinstance(m, LayerRange) for n in m.layers}
    if len(gone) == shape.num_layers:
        raise MigrationError("every layer would be away: keep at least one on the host")


def _where(unit: RemoteUnit) -> str:
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

    @property
    def shape(self) -> ModelGeometry:
        return ModelGeometry(self.num_layers, self.num_kv_heads)


def model_facts(config: VllmConfig) -> ModelFacts:
    """Of the model that ``config`` serves."""
    model = config.model_config
    layers = model.get_num_layers(config.parallel_config)
    element_bytes = model.dtype.itemsize
    weights = _checkpoint_layer_bytes(Path(model.model), element_bytes)
    if weights is None:
        # Attention and a gated MLP of four times the width: an upper bound for dense families.
        weights = 16 * model.get_hidden_size() ** 2 * element_bytes
    return ModelFacts(layers, model.get_num_kv_heads(config.parallel_config), weights)


def weight_bytes(modules: Modules, facts: ModelFacts) -> int:
    """Weights that a guest has to load; heads have none."""
    return len(modules.layers) * facts.layer_weight_bytes if isinstance(modules, LayerRange) else 0


def kv_bytes(modules: Modules, facts: ModelFacts, kv: KvStatus) -> int:
    """KV of the pool that the host started with; of older blocks the most that they can be."""
    if isinstance(modules, Context):
        return len(modules.layers) * kv.page_bytes * kv.num_blocks
    return round(num_pages(modules, facts.num_kv_heads) * kv.page_bytes) * kv.num_blocks


def check_room(
    modules: Modules, target: str, facts: ModelFacts, kv: KvStatus, available: AvailableBytes
) -> int:
    """Bytes that the modules take beside ``target``.

    Raises:
        MigrationError: It has no room for them.
    """
    needed = weight_bytes(modules, facts) + kv_bytes(modules, facts, kv)
    there = available(target)
    if needed + GUEST_BYTES > there:
        raise MigrationError(
            f"{target} has no room for {modules}: they take {format_size(needed)} and a guest "
            f"{format_size(GUEST_BYTES)}, {format_size(max(there, 0))} are available there: move "
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
