"""Sharing of devices between instances and guests: bounds, slow-downs, and their metrics."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping

from banaserve.base.errors import BanaServeError
from banaserve.base.names import check_known
from banaserve.base.types import InstanceId
from banaserve.contracts.migration_api import GuestSharing, ShareRequest
from banaserve.serving.monitoring import metrics
from banaserve.serving.moves.coordinator import Coordinator
from banaserve.serving.moves.guest_pool import GuestHandle, GuestPool
from banaserve.serving.moves.host_state import HostState

_MOST_BUSY = 0.99


def predicted_slow_down(busy_fraction: float) -> float:
    """Return the predicted factor of a step's duration beside guests, 1 without guests.

    Work on a device that others use for a fraction b of the time runs at 1 - b of its speed.

    Args:
        busy_fraction: Fraction of the time that the guests compute, in [0, 1].
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
                await tell(guest, host_state, wanted)


async def tell(guest: GuestHandle, host_state: HostState, fraction: float) -> None:
    """Bound one guest's share.

    Raises:
        MigrationError: The guest cannot be told at present.
        InstanceDeadError: The guest's host has ended.
    """
    await host_state.link().set_share(guest.id, fraction)
    guest.share = fraction


def count(sharing: GuestSharing) -> None:
    """Publish the share and the slow-downs as metrics."""
    metrics.GUEST_SHARE.labels(sharing.instance).set(sharing.fraction)
    slow_downs = metrics.SLOW_DOWN
    slow_downs.labels(sharing.instance, "predicted").set(sharing.predicted_slow_down)
    if sharing.measured_slow_down is not None:
        slow_downs.labels(sharing.instance, "measured").set(sharing.measured_slow_down)
