"""Cluster: the instances of a server, their start and end, and the set of those that serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from itertools import chain

from banaserve.base.clock import Clock
from banaserve.base.errors import InstanceDeadError
from banaserve.base.types import InstanceId, InstanceView
from banaserve.serving.instances.instance import Instance, State
from banaserve.serving.instances.probe import ClusterTimeouts
from banaserve.serving.instances.supervisor import Supervisor
from banaserve.serving.launch.engine_settings import EngineSettings

_POLL_S = 0.02


class Cluster:
    """All instances of a server.

    Attributes:
        instances: Instances by id; removed instances are not included.
    """

    def __init__(
        self, instances: Sequence[Instance], clock: Clock, timeouts: ClusterTimeouts
    ) -> None:
        self.instances = {instance.id: instance for instance in instances}
        self.supervisor = Supervisor(self.instances, clock, timeouts, self._note_service)
        self._clock = clock
        self._timeouts = timeouts
        self._served_s = clock.now()

    async def start(self, on_ready: Callable[[Instance], None]) -> None:
        """Start all instances concurrently, then keep them alive.

        Raises:
            InstanceDeadError: An instance could not be started.
        """

        async def start_one(instance: Instance) -> None:
            await instance.start(self._timeouts.start_s)
            on_ready(instance)

        async with asyncio.TaskGroup() as group:
            for instance in self.instances.values():
                group.create_task(start_one(instance))
        for instance in self.instances.values():
            self.supervisor.watch(instance)

    def adopt(self, instance: Instance) -> None:
        """Add an instance that has started: route requests to it and keep it alive."""
        self.instances[instance.id] = instance
        self.supervisor.watch(instance)

    async def remove(self, instance_id: InstanceId) -> None:
        """End an instance and forget it; its remaining legs fail and continue elsewhere."""
        await self.supervisor.end_removed(self.instances.pop(instance_id))

    def refuse(self) -> None:
        """Fail the running requests, so that their connections can close."""
        for instance in self.instances.values():
            instance.mark_dead(State.FAILED)

    async def stop(self) -> None:
        """End all instances; running requests fail."""
        await self.supervisor.stop()
        for instance in self.instances.values():
            instance.mark_dead()
            instance.kill()

    def instance(self, instance_id: InstanceId) -> Instance:
        """Return the instance with this id.

        Raises:
            InstanceDeadError: The instance has been removed.
        """
        if (instance := self.instances.get(instance_id)) is None:
            raise InstanceDeadError(f"instance {instance_id} has been removed")
        return instance

    def serving(self) -> list[Instance]:
        """Return the instances whose engines are ready; some may take no new requests."""
        return [i for i in self.instances.values() if i.state is State.READY]

    def views(self) -> dict[InstanceId, InstanceView]:
        """Return views of all instances, with the distances between different machines."""
        by_node: dict[str, list[Instance]] = {}
        for one in self.instances.values():
            by_node.setdefault(one.place.node, []).append(one)
        views: dict[InstanceId, InstanceView] = {}
        for node, its in by_node.items():
            elsewhere = chain(*(others for other, others in by_node.items() if other != node))
            far = {one.id: its[0].distance_to(one) for one in elsewhere}
            views |= {one.id: one.view(far) for one in its}
        return views

    async def taking(self) -> list[Instance]:
        """Return the instances that accept new requests, or else all ready ones.

        Waits while no instance accepts requests because engines are being replaced.
        """
        while self.is_replacing and not any(i.takes_requests for i in self.instances.values()):
            await self._clock.sleep(_POLL_S)
        serving = [i for i in self.serving() if i.llm is not None]
        return [i for i in serving if i.takes_requests] or serving

    @property
    def newest_settings(self) -> EngineSettings:
        """Settings for the start of a new engine: the newest ones of all instances."""
        return max((i.settings for i in self.instances.values()), key=lambda s: s.number)

    @property
    def is_replacing(self) -> bool:
        """True if an engine is being replaced by a rolling restart."""
        return any(one.service.is_replaced for one in self.instances.values())

    @property
    def is_ready(self) -> bool:
        """True if every role has an instance that serves; instances being replaced are ignored."""
        serving = {i.role for i in self._staying if i.state is State.READY}
        return bool(serving) and serving == {i.role for i in self._staying}

    @property
    def _staying(self) -> list[Instance]:
        return [i for i in self.instances.values() if not i.service.is_replaced]

    @property
    def has_failed(self) -> bool:
        """True if every instance has been given up, and none waits for its machine."""
        return self.supervisor.has_failed

    @property
    def is_healthy(self) -> bool:
        """True if an instance takes requests, or did so within ``unserved_s``.

        One is enough: it serves both legs while no instance of the other role is ready. Requests
        also wait for an instance being replaced, however long it takes to start.
        """
        self._note_service()
        is_recent = self._clock.now() - self._served_s < self._timeouts.unserved_s
        return is_recent and not self.has_failed

    def _note_service(self) -> None:
        if self.is_replacing or any(one.takes_requests for one in self.instances.values()):
            self._served_s = self._clock.now()
