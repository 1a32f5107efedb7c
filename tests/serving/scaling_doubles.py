"""A cluster whose instances come and go without engines, and a scaler of it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import executor_doubles as doubles
from banaserve.base.clock import WallClock
from banaserve.base.errors import InstanceDeadError, MigrationError, UserError
from banaserve.base.types import InstanceId, Role
from banaserve.contracts.instances import NodeStatus
from banaserve.serving.operations.roles import Drains
from banaserve.serving.operations.scaler import Scaler
from migration_doubles import SleepLauncher


class NewInstance(doubles.Instance):
    """One that starts when it may, unless it is killed before."""

    def __init__(self, name: InstanceId, role: Role, may_start: asyncio.Event) -> None:
        super().__init__(name)
        self.role = role
        self.llm = None
        self.is_killed = asyncio.Event()
        self._may_start = may_start

    is_behind = False

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
        self.newest_settings = SimpleNamespace(argv=("--model", "newest"))
        self._coordinator = world.cluster.coordinator

    def instance(self, name: InstanceId) -> Any:
        return self.instances[name]

    def adopt(self, instance: Any) -> None:
        self.instances[instance.id] = instance

    async def remove(self, name: InstanceId) -> None:
        self.instances.pop(name).die()
        self._coordinator.instance_ended(name)


class Machines(SleepLauncher):
    """Nodes without machines; see ``Launcher``.

    Attributes:
        on: Instances of each node.
        unusable: Why some cannot join.
        asked: What nodes have been added with.
        new: That the cluster gains.
        num_looks: Number of times that the cluster was asked what it has gained.
    """

    def __init__(self, **on: str) -> None:
        super().__init__()
        self.on = {name: names.split() for name, names in on.items()}
        self.unusable: dict[str, str] = {}
        self.asked: list[tuple[str, tuple[str, ...]]] = []
        self.new: list[str] = []
        self.num_looks = 0
        self.may_join = asyncio.Event()
        self.may_join.set()
        self.may_leave = asyncio.Event()
        self.may_leave.set()
        self._held: set[str] = set()

    def nodes(self) -> list[NodeStatus]:
        return [
            NodeStatus(name, "leaving" if name in self._held else "ready", list(names))
            for name, names in self.on.items()
        ]

    async def gained(self) -> list[str]:
        self.num_looks += 1
        new, self.new = self.new, []
        return new

    async def add_node(
        self, address: str, vllm_argv: tuple[str, ...], say: Callable[[str], None]
    ) -> str:
        say(f"looking for {address}")
        self.asked.append((address, vllm_argv))
        await self.may_join.wait()
        if problem := self.unusable.get(address):
            raise UserError(problem)
        self.on[address] = []
        return address

    def hold_node(self, name: str, *, is_held: bool) -> None:
        if name not in self.on:
            raise UserError(f"there is no node {name}")
        (self._held.add if is_held else self._held.discard)(name)

    async def remove_node(self, name: str) -> None:
        if self.on[name]:
            raise MigrationError(f"node {name} has instances still")
        del self.on[name]
        await self.may_leave.wait()

    def reserve(self, instance_id: str) -> None:
        free = [name for name in self.on if name not in self._held]
        self.on[min(free, key=lambda name: len(self.on[name]))].append(instance_id)

    def release(self, instance_id: str) -> None:
        for names in self.on.values():
            if instance_id in names:
                names.remove(instance_id)


class Factory:
    """Makes instances; see ``InstanceFactory``.

    Args:
        machines: That have room for them; None for this one.

    Attributes:
        made: All of them.
        num_devices: That are left.
        discarded: Ids that were given back.
    """

    def __init__(self, machines: Machines | None = None) -> None:
        self._machines = machines
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
        if self._machines is not None:
            self._machines.reserve(name)
        self.made.append(NewInstance(name, role, self.may_start))
        return self.made[-1]

    def discard(self, name: InstanceId) -> None:
        self.discarded.append(name)
        if self._machines is not None:
            self._machines.release(name)


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
