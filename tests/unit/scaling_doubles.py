"""A cluster whose instances come and go without engines, and a scaler of it."""

from __future__ import annotations

import asyncio
from typing import Any

import executor_doubles as doubles
from banaserve.clock import WallClock
from banaserve.engine.vllm.roles.drain import Drains
from banaserve.engine.vllm.scaling.scaler import Scaler
from banaserve.errors import InstanceDeadError, MigrationError
from banaserve.types import InstanceId, Role


class NewInstance(doubles.Instance):
    """One that starts when it may, unless it is killed before."""

    def __init__(self, name: InstanceId, role: Role, may_start: asyncio.Event) -> None:
        super().__init__(name)
        self.role = role
        self.llm = None
        self.is_killed = asyncio.Event()
        self._may_start = may_start

    async def start(self, _: float) -> None:
        waits = [asyncio.create_task(one.wait()) for one in (self._may_start, self.is_killed)]
        await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
        for one in waits:
            one.cancel()
        if self.is_killed.is_set():
            raise InstanceDeadError(f"instance {self.id} ended while starting: no more memory")
        self.llm = self.engine

    def mark_dead(self) -> None:
        self.llm = None

    def kill(self) -> None:
        self.is_killed.set()


class Cluster:
    """The instances of a ``World``."""

    def __init__(self, world: doubles.World) -> None:
        self.instances: dict[InstanceId, Any] = world.instances
        self.newest_settings = object()
        self._coordinator = world.cluster.coordinator

    def instance(self, name: InstanceId) -> Any:
        return self.instances[name]

    def adopt(self, instance: Any) -> None:
        self.instances[instance.id] = instance

    async def remove(self, name: InstanceId) -> None:
        self.instances.pop(name).die()
        self._coordinator.instance_ended(name)


class Factory:
    """Makes instances; see ``InstanceFactory``.

    Attributes:
        made: All of them.
        num_devices: That are left.
        discarded: Ids that were given back.
    """

    def __init__(self) -> None:
        self.made: list[NewInstance] = []
        self.num_devices = 10
        self.discarded: list[InstanceId] = []
        self.may_start = asyncio.Event()
        self.may_start.set()

    def check_memory(self, num_instances: int) -> None:
        if num_instances > 20:
            raise MigrationError("too little memory")

    def make(self, name: InstanceId, role: Role, _: object) -> NewInstance:
        if not self.num_devices:
            raise MigrationError("no GPUs are left")
        self.num_devices -= 1
        self.made.append(NewInstance(name, role, self.may_start))
        return self.made[-1]

    def discard(self, name: InstanceId) -> None:
        self.discarded.append(name)


def scaler_of(world: doubles.World, drains: Drains, factory: Any = None, **options: bool) -> Scaler:
    """Returns a scaler of the instances of ``world``."""
    cluster: Any = Cluster(world)
    return Scaler(
        cluster,
        world.cluster.coordinator,
        world.roles,
        drains,
        factory or Factory(),
        WallClock(),
        60.0,
        **options,
    )
