"""The store's hooks around attention, for layers whose attention runs elsewhere."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

_NOTHING = torch.empty(0)


def _connector() -> Any | None:
    if not has_kv_transfer_group():
        return None
    connector = get_kv_transfer_group()
    return connector if connector.has_connector_metadata() else None


def wait_for_loads(names: Iterable[str]) -> None:
    """Return when the blocks that these layers read have been fetched."""
    connector = _connector()
    if connector is not None:
        for name in names:
            connector.wait_for_layer_load(name)


def save_layers(names: Iterable[str], metadata: Any) -> None:
    """Say that these layers' blocks of this step may be saved."""
    connector = _connector()
    if connector is not None:
        for name in names:
            of_layer = metadata[name] if isinstance(metadata, dict) else metadata
            connector.save_kv_layer(name, _NOTHING, of_layer)


def hold_saves(hold: bool) -> None:
    """Let layers not be saved when their attention ends: more tokens of this step will come."""
    if has_kv_transfer_group():
        get_kv_transfer_group().holds_saves = hold


def abandon_step() -> None:
    """Nothing that this step computes may reach the store."""
    if has_kv_transfer_group() and hasattr(get_kv_transfer_group(), "abandon_step"):
        get_kv_transfer_group().abandon_step()
