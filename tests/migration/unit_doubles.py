"""Units of a host that has KV and nothing else of an engine."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from banaserve.kernels.reference import ReferenceKernels
from banaserve.migration.kv.host_kv import HostKv
from banaserve.migration.modules.paged_attention import KernelsAttention
from banaserve.migration.units.base import MigrationUnit
from banaserve.migration.units.host_unit import HostEngine, HostUnit
from banaserve.migration.units.registry import make_unit


def attended_by_kernels() -> Any:
    """An attention whose pages our kernels read, whatever their shape."""
    impl: Any = KernelsAttention.__new__(KernelsAttention)
    impl.inner, impl.kernels = SimpleNamespace(), ReferenceKernels(torch.float32)
    return SimpleNamespace(impl=impl)


def engine_of(
    host: HostKv, attention: Any = None, *, poisons: bool = False, block_size: int = 16
) -> HostEngine:
    """An engine of attentions that are all alike."""
    nothing: Any = None
    one = attention or attended_by_kernels()
    return HostEngine(
        config=nothing,
        path="layers",
        layers=nothing,
        attentions=dict.fromkeys(host.tensors, one),
        kv=host,
        kv_shape=host.shape("NHD", block_size),
        step_context=nothing,
        on_lost=nothing,
        poisons=poisons,
    )


def unit_of(modules: MigrationUnit, host: HostKv) -> HostUnit:
    """Modules that are at home, as a unit."""
    return make_unit("u", modules, engine_of(host))
