"""Placement of all instances, for people and programs."""

from __future__ import annotations

import asyncio

import msgspec

from banaserve.base.errors import BanaServeError
from banaserve.contracts.migration_api import (
    ClusterPlacement,
    GuestStatus,
    InstancePlacement,
    Overlapping,
    UnitModules,
    UnitPlace,
)
from banaserve.migration.units.registry import write_modules
from banaserve.serving.moves.coordinator import Coordinator
from banaserve.serving.moves.guest_sharing import sharing_of
from banaserve.serving.moves.host_state import HostState


async def placement_of(coordinator: Coordinator) -> ClusterPlacement:
    """Ask every instance for its placement; an error becomes its ``migration_blocker``."""
    found = await asyncio.gather(*(_of(coordinator, h) for h in coordinator.hosts.values()))
    guests = [
        GuestStatus(
            guest.id,
            guest.host,
            guest.target,
            guest.pids,
            guest.num_bytes,
            guest.busy_fraction,
            guest.share,
            guest.way,
        )
        for guest in coordinator.guests
    ]
    return ClusterPlacement(list(found), guests, coordinator.recent())


async def _of(coordinator: Coordinator, host_state: HostState) -> InstancePlacement:
    instance = host_state.instance
    state = "ready" if instance.is_ready else "down"
    try:
        status = await host_state.refresh(memory=True)
        kv_bytes_here = host_state.kv.resident_bytes or 0
        num_blocks = (await host_state.link().pool_info()).num_blocks
    except BanaServeError as reason:
        return InstancePlacement(
            host_state.id, instance.role.value, state, str(reason), node=instance.place.node
        )
    facts = coordinator.facts
    return InstancePlacement(
        id=host_state.id,
        role=instance.role.value,
        state=state,
        migration_blocker="",
        epoch=status.epoch,
        num_layers=facts.num_layers,
        num_kv_heads=facts.num_kv_heads,
        num_blocks=num_blocks,
        blocks_gained=num_blocks - host_state.kv.num_blocks,
        kv_bytes=kv_bytes_here,
        units=_units(coordinator, host_state),
        guests_lost=status.guests_lost,
        steps_lost=status.steps_lost,
        sharing=sharing_of(coordinator, host_state),
        overlap=msgspec.convert(status.overlap, Overlapping, from_attributes=True),
        node=instance.place.node,
        graph_sizes=status.graph_sizes,
        graphs_captured=status.graphs_captured,
    )


def _units(coordinator: Coordinator, host_state: HostState) -> list[UnitPlace]:
    return [
        UnitPlace(
            unit.unit_id,
            msgspec.convert(write_modules(unit.modules), UnitModules),
            unit.at,
            unit.guest_id,
            unit.epoch,
            host_state.num_bytes(unit.modules, unit.num_older_blocks),
            str(unit.modules),
            list(unit.modules.layers) if unit.modules.has_weights else [],
        )
        for unit in host_state.units(coordinator.guests)
    ]
