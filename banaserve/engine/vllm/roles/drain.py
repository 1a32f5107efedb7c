"""Drains: an instance is sent nothing more, and its streams go on elsewhere at once.

It serves on while they leave, stays as it is until it is released, and may be ended meanwhile.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Protocol

from banaserve.engine.interface import DrainState
from banaserve.engine.vllm.roles.role_switch import RoleInstance, Roles
from banaserve.errors import MigrationError
from banaserve.names import check_known
from banaserve.types import InstanceId

logger = logging.getLogger(__name__)
_POLL_S = 0.02


class DrainedInstance(RoleInstance, Protocol):
    """What a drain needs of an ``Instance``."""

    def move_streams(self) -> int: ...


class Drains:
    """Drains instances and lets them serve again.

    Args:
        roles: Says who would be missed.
    """

    def __init__(self, instances: Mapping[InstanceId, DrainedInstance], roles: Roles) -> None:
        self._instances = instances
        self._roles = roles
        self._leaving: set[InstanceId] = set()

    def begin(self, name: str) -> DrainState:
        """Send an instance nothing more, and let its streams go on elsewhere.

        A prompt that is being computed there is computed to its end.

        Raises:
            UserError: There is no such instance.
            MigrationError: No other serves what it serves, or it is switching its role.
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
            MigrationError: It was not drained.
        """
        instance = self._named(name)
        if not instance.is_held:
            raise MigrationError(f"instance {name} was not drained: nothing to undo")
        if instance.id in self._leaving:
            raise MigrationError(f"instance {name} is being removed")
        instance.is_held = False
        return self._state(instance)

    def leave(self, instance_id: InstanceId) -> bool:
        """Drain an instance that is to be removed; returns whether it was drained before.

        Nobody releases it until it is back or gone.

        Raises:
            MigrationError: No other serves what it serves, or it is switching its role.
        """
        was_held = self._instances[instance_id].is_held
        self.begin(instance_id)
        self._leaving.add(instance_id)
        return was_held

    def is_back(self, instance_id: InstanceId, was_held: bool) -> None:
        """An instance is not removed after all: it serves again unless it was drained before."""
        self._leaving.discard(instance_id)
        self._instances[instance_id].is_held = was_held

    def is_gone(self, instance_id: InstanceId) -> None:
        """An instance has been removed."""
        self._leaving.discard(instance_id)

    async def state(self, name: str, wait_s: float = 0.0) -> DrainState:
        """How far it is; waits so long for the last request to leave.

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
