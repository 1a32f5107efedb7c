"""Drains: an instance receives no more requests, and its streams move elsewhere at once.

The instance keeps serving while the streams leave. It stays drained until it is released, and may
be ended meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping

from banaserve.base.names import check_known
from banaserve.base.types import InstanceId
from banaserve.contracts.instances import DrainState
from banaserve.serving.instance import Instance
from banaserve.serving.roles.role_switch import Roles

logger = logging.getLogger(__name__)
_POLL_S = 0.02


class Drains:
    """Drains of instances, and their release.

    Args:
        instances: Instances by id.
        roles: Role switches; they check whether other instances serve a drained instance's legs.
    """

    def __init__(self, instances: Mapping[InstanceId, Instance], roles: Roles) -> None:
        self._instances = instances
        self._roles = roles

    def begin(self, name: str) -> DrainState:
        """Send an instance no more requests, and move its streams elsewhere.

        A prompt that is being computed there is completed.

        Raises:
            UserError: There is no such instance.
            MigrationError: No other instance serves one of its legs, or it is switching its role.
        """
        instance = self._named(name)
        self._empty(instance, instance.service.drain)
        return self._state(instance)

    def _empty(self, instance: Instance, drain: Callable[[], None]) -> None:
        if not instance.service.is_drained:
            self._roles.check_leaves(instance)
        drain()
        num_moved = instance.move_streams()
        logger.info("instance %s is drained: %d streams go on elsewhere", instance.id, num_moved)

    def release(self, name: str) -> DrainState:
        """Let an instance serve again.

        Raises:
            UserError: There is no such instance.
            MigrationError: The instance was not drained, or is being removed.
        """
        instance = self._named(name)
        instance.service.release()
        return self._state(instance)

    def leave(self, instance_id: InstanceId) -> None:
        """Drain an instance that is to be removed; ``release`` refuses it until ``is_back``.

        Raises:
            MigrationError: No other instance serves one of its legs, or it is switching its role.
        """
        instance = self._instances[instance_id]
        self._empty(instance, instance.service.leave)

    def is_back(self, instance_id: InstanceId) -> None:
        """Cancel the removal of an instance: it serves again unless it was drained before."""
        self._instances[instance_id].service.stay()

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
        while instance.service.is_drained and instance.inflight_requests:
            if asyncio.get_running_loop().time() >= deadline_s:
                break
            await asyncio.sleep(_POLL_S)
        return self._state(instance)

    def _named(self, name: str) -> Instance:
        check_known("instance", name, self._instances)
        return self._instances[InstanceId(name)]

    @staticmethod
    def _state(instance: Instance) -> DrainState:
        return DrainState(instance.id, instance.service.is_drained, instance.inflight_requests)
