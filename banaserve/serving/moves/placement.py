"""Placement of all instances, for people and programs."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping

from banaserve.base.errors import BanaServeError
from banaserve.base.text.names import check_known
from banaserve.base.types import InstanceId
from banaserve.contracts.migration_api import (
    ClusterPlacement,
    GuestSharing,
    GuestStatus,
    InstancePlacement,
    ShareRequest,
    UnitPlace,
)
from banaserve.migration.units.registry import write_modules
from banaserve.serving.monitoring import metrics
from banaserve.serving.moves.coordinator import Coordinator
from banaserve.serving.moves.guest_pool import GuestPool
from banaserve.serving.moves.host_state import HostState


async def placement_of(coordinator: Coordinator) -> ClusterPlacement:
    """Ask every instance for its placement; an error becomes its ``migration_blocker``."""
    found = await asyncio.gather(*(_of(coordinator, h) for h in coordinator.hosts.values()))
    guests = [
        GuestStatus(g.id, g.host, g.target, g.pids, g.num_bytes, g.busy_fraction, g.share, g.way)
        for g in coordinator.guests
    ]
    return ClusterPlacement(list(found), guests, coordinator.recent())


async def _of(coordinator: Coordinator, host_state: HostState) -> InstancePlacement:
    instance = host_state.instance
    state = "ready" if instance.is_ready else "down"
    try:
        status = await host_state.refresh(memory=True)
        num_blocks = await host_state.link().pool_blocks()
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
        blocks_gained=num_blocks - status.kv.num_blocks,
        kv_bytes=status.kv.resident_bytes or 0,
        units=_units(coordinator, host_state),
        guests_lost=status.guests_lost,
        steps_lost=status.steps_lost,
        sharing=sharing_of(coordinator, host_state),
        overlap=status.overlap,
        node=instance.place.node,
        graph_sizes=status.graph_sizes,
        graphs_captured=status.graphs_captured,
    )


def _units(coordinator: Coordinator, host_state: HostState) -> list[UnitPlace]:
    return [
        UnitPlace(
            unit.unit_id,
            write_modules(unit.modules),
            unit.at,
            unit.guest_id,
            unit.epoch,
            host_state.num_bytes(unit.modules, unit.num_older_blocks),
            str(unit.modules),
            list(unit.modules.layers) if unit.modules.has_weights else [],
        )
        for unit in host_state.units(coordinator.guests)
    ]


_MOST_BUSY = 0.99


def predicted_slow_down(busy_fraction: float) -> float:
    """Return the predicted factor of a step's duration beside guests, 1 without guests.

    Work on a device that others use for a fraction b of the time runs at 1 - b of its speed.
    """
    return 1.0 / (1.0 - min(busy_fraction, _MOST_BUSY))


async def share(coordinator: Coordinator, ask: ShareRequest) -> GuestSharing:
    """Bound the share of the guests beside an instance, and return their cost to the instance.

    Raises:
        UserError: There is no such instance.
        MigrationError: The share is out of range.
    """
    check_known("instance", ask.instance, coordinator.hosts)
    target = InstanceId(ask.instance)
    coordinator.guests.set_bound(target, ask.fraction)
    await settle(coordinator.guests, coordinator.hosts)
    return sharing_of(coordinator, coordinator.hosts[target])


def sharing_of(coordinator: Coordinator, host_state: HostState) -> GuestSharing:
    """Return the bound, the use and the cost of the guests beside an instance."""
    target = host_state.instance.id
    here = coordinator.guests.beside(target)
    busy = min(1.0, sum(guest.busy_fraction for guest in here))
    return GuestSharing(
        instance=target,
        fraction=coordinator.guests.bound(target),
        num_guests=len(here),
        busy_fraction=busy,
        predicted_slow_down=predicted_slow_down(busy),
        measured_slow_down=host_state.slow_down,
    )


async def settle(guests: GuestPool, hosts: Mapping[InstanceId, HostState]) -> None:
    """Tell each guest its share if it has changed; a guest that is building is told later."""
    for guest in guests:
        wanted = guests.share_of(guest)
        host_state = hosts.get(guest.host)  # the host may be removed while other guests are told
        if host_state is not None and guest.share != wanted and guest.detached_s is None:
            with contextlib.suppress(BanaServeError):
                await guest.tell_share(host_state.link(), wanted)


def count(sharing: GuestSharing) -> None:
    """Publish the share and the slow-downs as metrics."""
    metrics.GUEST_SHARE.labels(sharing.instance).set(sharing.fraction)
    slow_downs = metrics.SLOW_DOWN
    slow_downs.labels(sharing.instance, "predicted").set(sharing.predicted_slow_down)
    if sharing.measured_slow_down is not None:
        slow_downs.labels(sharing.instance, "measured").set(sharing.measured_slow_down)
