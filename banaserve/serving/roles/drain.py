"""Drains: an instance receives no more requests, and its streams move elsewhere at once.

The instance keeps serving while the streams leave. It stays drained until it is released, and may
be ended meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from banaserve.base.errors import MigrationError
from banaserve.base.names import check_known
from banaserve.base.types import InstanceId
from banaserve.contracts.instances import DrainState
from banaserve.serving.roles.role_switch import RoleInstance, Roles

logger = logging.getLogger(__name__)
_POLL_S = 0.02


class DrainedInstance(RoleInstance, Protocol):
    """The part of an ``Instance`` that a drain needs."""

    def move_streams(self) -> int: ...


class Drains:
    """Drains of instances, and their release.

    Args:
        instances: Instances by id.
        roles: Role switches; they check whether other instances serve a drained instance's legs.
    """

    def __init__(self, instances: Mapping[InstanceId, DrainedInstance], roles: Roles) -> None:
        self._instances = instances
        self._roles = roles
        self._leaving: set[InstanceId] = set()

    def begin(self, name: str) -> DrainState:
        """Send an instance no more requests, and move its streams elsewhere.

        A prompt that is being computed there is completed.

        Raises:
            UserError: There is no such instance.
            MigrationError: No other instance serves one of its legs, or it is switching its role.
        """
        instance = self._named(name)
        if not instance.is_held:
            self._roles.check_leaves(instance)
            instance.is_held = True
        num_moved = instance.move_streams()
        logger.info("instance %s is drained: %d streams go on elsewhere", name, num_moved)
        return self._state(instance)

    def release(self, name: str) -> DrainState:
        """Let an instance serve again.

        Raises:
            UserError: There is no such instance.
            MigrationError: The instance was not drained, or is being removed.
        """
        instance = self._named(name)
        if not instance.is_held:
            raise MigrationError(f"instance {name} was not drained: nothing to undo")
        if instance.id in self._leaving:
            raise MigrationError(f"instance {name} is being removed")
        instance.is_held = False
        return self._state(instance)

    def leave(self, instance_id: InstanceId) -> bool:
        """Drain an instance that is to be removed; return whether it was drained before.

        ``release`` refuses the instance until ``is_back`` or ``is_gone`` has been called.

        Raises:
            MigrationError: No other instance serves one of its legs, or it is switching its role.
        """
        was_held = self._instances[instance_id].is_held
        self.begin(instance_id)
        self._leaving.add(instance_id)
        return was_held

    def is_back(self, instance_id: InstanceId, was_held: bool) -> None:
        """Cancel the removal of an instance: it serves again unless it was drained before."""
        self._leaving.discard(instance_id)
        self._instances[instance_id].is_held = was_held

    def is_gone(self, instance_id: InstanceId) -> None:
        """Record that an instance has been removed."""
        self._leaving.discard(instance_id)

    async def state(self, name: str, wait_s: float = 0.0) -> DrainState:
        """Return the drain state, after waiting for the last request to leave.

        Args:
            name: Id of the instance.
            wait_s: Maximum waiting time, in seconds.

        Raises:
            UserError: There is no such instance.
        """
        instance = self._named(name)
        deadline_s = asyncio.get_running_loop().time() + wait_s
        while instance.is_held and instance.inflight_requests:
            if asyncio.get_running_loop().time() >= deadline_s:
                break
            await asyncio.sleep(_POLL_S)
        return self._state(instance)

    def _named(self, name: str) -> DrainedInstance:
        check_known("instance", name, self._instances)
        return self._instances[InstanceId(name)]

    @staticmethod
    def _state(instance: DrainedInstance) -> DrainState:
        return DrainState(instance.id, instance.is_held, instance.inflight_requests)
