"""Sizes of modules and of guests, and the room for them beside an instance."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from banaserve.base.errors import MigrationError
from banaserve.contracts.move_phase import ModelGeometry
from banaserve.engine.compat.config import VllmConfig, element_bytes
from banaserve.kvstore.sizes import format_size
from banaserve.migration.units.base import MigrationUnit
from banaserve.migration.worker_api import KvStatus

GUEST_BYTES = 160 << 20
"""Memory of a guest's process besides weights and KV, in bytes: its pages that are not shared with
its parent, on CPU."""
_LAYER = re.compile(r"\.(?:layers|h|blocks)\.(\d+)\.")
_MAX_HEADER_BYTES = 64 << 20
_ELEMENT_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}


class ModelFacts(NamedTuple):
    """Facts of the model for the coordinator; bytes as the engines hold them."""

    num_layers: int
    num_kv_heads: int
    layer_weight_bytes: int
    num_experts: int = 0

    @property
    def shape(self) -> ModelGeometry:
        return ModelGeometry(self.num_layers, self.num_kv_heads, self.num_experts)

    def num_bytes(self, modules: MigrationUnit, kv: KvStatus) -> int:
        """Return the bytes of the weights that a guest has to load, and of its KV at most.

        The KV is that of the pool that the host started with.
        """
        pages = round(modules.kv_pages(self.num_kv_heads) * kv.page_bytes)
        return modules.weight_bytes(self.layer_weight_bytes) + pages * kv.num_blocks


def model_facts(config: VllmConfig) -> ModelFacts:
    model = config.model_config
    layers = model.get_num_layers(config.parallel_config)
    number_bytes = element_bytes(model)
    weights = _checkpoint_layer_bytes(Path(model.model), number_bytes)
    if weights is None:
        # Attention and a gated MLP of four times the width: an upper bound for dense families.
        weights = 16 * model.get_hidden_size() ** 2 * number_bytes
    num_kv_heads = model.get_num_kv_heads(config.parallel_config)
    return ModelFacts(layers, num_kv_heads, weights, model.get_num_experts())


def check_room(
    modules: MigrationUnit,
    target: str,
    facts: ModelFacts,
    kv: KvStatus,
    available_bytes: int,
    num_ranks: int = 1,
) -> int:
    """Return the bytes that the modules take beside ``target``, if it has room for them.

    Args:
        num_ranks: Number of tensor-parallel ranks of the host: a guest has a process for each.

    Raises:
        MigrationError: The target has no room for the modules.
    """
    needed = facts.num_bytes(modules, kv)
    guest = num_ranks * GUEST_BYTES
    if needed + guest > available_bytes:
        raise MigrationError(
            f"{target} has no room for {modules}: they take {format_size(needed)} and a guest "
            f"{format_size(guest)}, {format_size(max(available_bytes, 0))} are available there: "
            "move less, or serve with a smaller --kv-cache-memory-bytes"
        )
    return needed


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
