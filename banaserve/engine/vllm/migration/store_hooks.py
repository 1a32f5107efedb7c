"""The store's hooks around attention, for layers whose attention runs elsewhere."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from vllm.distributed.kv_transfer import get_kv_transfer_group, has_kv_transfer_group

from banaserve.engine.vllm.migration.messages import SlotCopies

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


def slots_to_fill() -> SlotCopies | None:
    """What this step saves, for a guest to save of its layers; None where it is not to."""
    connector = _connector()
    if connector is None:
        return None
    found = connector.slots_to_fill()
    if found.view is None:
        return None
    blocks = tuple(copy.block_id for copy in found.copies)
    slots = tuple(copy.slot.index for copy in found.copies)
    return SlotCopies(found.view.generation, blocks, slots)


def saved_elsewhere(names: Sequence[str], seconds: float) -> None:
    """Say that a guest has saved these layers' blocks of this step, in so many seconds."""
    connector = _connector()
    if connector is not None:
        connector.saved_elsewhere(names, seconds)


def hold_saves(hold: bool) -> None:
    """Let layers not be saved when their attention ends: more tokens of this step will come."""
    if has_kv_transfer_group():
        get_kv_transfer_group().holds_saves = hold


def abandon_step() -> None:
    """Nothing that this step computes may reach the store."""
    if has_kv_transfer_group() and hasattr(get_kv_transfer_group(), "abandon_step"):
        get_kv_transfer_group().abandon_step()
