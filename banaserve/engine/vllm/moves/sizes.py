"""How many bytes a move takes, and whether its target has room for them."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import msgspec
import psutil
from vllm.config import VllmConfig

from banaserve.engine.vllm.migration.modules import Context, LayerRange, ModelShape, Modules
from banaserve.engine.vllm.moves.planner import num_pages
from banaserve.errors import MigrationError
from banaserve.kvstore.sizes import format_size

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
    def shape(self) -> ModelShape:
        return ModelShape(self.num_layers, self.num_kv_heads)


class KvFacts(msgspec.Struct, frozen=True):
    """``status()["kv"]`` of a host: see ``worker_methods``; other fields are ignored."""

    num_blocks: int
    max_blocks: int
    blocks_gained: int
    page_bytes: int
    resident_bytes: int | None = None


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


def kv_bytes(modules: Modules, facts: ModelFacts, kv: KvFacts) -> int:
    """KV of the pool that the host started with; of older blocks the most that they can be."""
    if isinstance(modules, Context):
        return len(modules.layers) * kv.page_bytes * kv.num_blocks
    return round(num_pages(modules, facts.num_kv_heads) * kv.page_bytes) * kv.num_blocks


def check_room(
    modules: Modules, target: str, facts: ModelFacts, kv: KvFacts, available: AvailableBytes
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
