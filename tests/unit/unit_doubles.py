"""Units of a host that has KV and nothing else of an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from banaserve.engine.vllm.migration.kv.host_kv import HostKv
from banaserve.engine.vllm.migration.modules.paged_attention import write_tokens
from banaserve.engine.vllm.migration.units.base import MigrationUnit
from banaserve.engine.vllm.migration.units.host_unit import HostEngine, HostUnit
from banaserve.engine.vllm.migration.units.registry import HostUnits


def write(attention: Any, key: Any, value: Any, cache: Any, slots: Any) -> None:
    """As an attention whose keys are kept as they are written."""
    write_tokens(cache, key, value, slots)


def engine_of(
    host: HostKv, attention: Any = None, *, poisons: bool = False, block_size: int = 16
) -> HostEngine:
    """An engine of attentions that are all alike."""
    nothing: Any = None
    one = attention or SimpleNamespace(impl=SimpleNamespace(do_kv_cache_update=write))
    return HostEngine(
        config=nothing,
        path="layers",
        layers=nothing,
        attentions=dict.fromkeys(host.tensors, one),
        kv=host,
        kv_shape=host.shape("NHD", block_size),
        watch=nothing,
        on_lost=nothing,
        poisons=poisons,
    )


def unit_of(modules: MigrationUnit, host: HostKv) -> HostUnit:
    """Modules that are at home, as a unit."""
    return HostUnits(engine_of(host)).make("u", modules)
