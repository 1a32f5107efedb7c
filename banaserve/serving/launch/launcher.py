"""Launchers of engine cores: by a fork from the engine parent (CPU), or as new processes (GPU)."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import signal
import socket
import subprocess
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec

from banaserve.base.errors import InstanceDeadError, UserError
from banaserve.base.platform.processes import in_daemon_thread
from banaserve.base.types import Distance
from banaserve.contracts.instances import NodeStatus
from banaserve.kvstore.daemon.options import StoreOptions
from banaserve.serving.launch.devices import Devices
from banaserve.serving.launch.messages import Order, StartEngine, spawn
from banaserve.serving.launch.parent_link import ORDER_S, ParentLink, ParentLostError
from banaserve.serving.monitoring import metrics
from banaserve.transport.channels.connect import tcp_address
from banaserve.transport.registry import SHARED_MEMORY

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"
NO_NODES = (
    "this server's engines run on its own machine: nodes join one that was started with --node or "
    "--cluster"
)
"""Reason why this server has no nodes."""


class InstancePlace(NamedTuple):
    """Machine of an instance.

    Attributes:
        node: Name of the machine; empty for this machine.
        store: ``HOST:PORT`` of the store on the machine, as its peers know it; empty if that is the
            front door's store, or there is none.
        is_local: True if the engine's process runs on this machine; False if a shim stands for it.
        is_there: True if the machine is available, so that an engine can be started.
    """

    node: str = ""
    store: str = ""
    is_local: bool = True
    is_there: bool = True


class GuestPlace(NamedTuple):
    """Place at which a host reaches a guest; fields as in ``GuestAddress``."""

    channel: str
    transport: str
    folder: str
    listen_host: str = LOOPBACK
    is_elsewhere: bool = False


class Launcher(ABC):
    """Launcher of engine cores and guests.

    The methods that are not abstract are those of a launcher of processes on this machine.
    """

    @abstractmethod
    async def start(self, order: Order) -> int:
        """Start an engine core or a guest, and return its process id."""

    @abstractmethod
    def close(self) -> None:
        """End all remaining engine cores and guests."""

    async def guest_place(
        self, host: str, target: str, guest_id: str, transport: str, sockets: Path
    ) -> GuestPlace:
        """Return the place at which instance ``host`` can reach a guest beside ``target``.

        Args:
            sockets: Private folder of the run.

        Raises:
            InstanceDeadError: The machine of ``host`` or ``target`` is away.
        """
        if transport == SHARED_MEMORY:
            return GuestPlace(str(sockets / f"{guest_id}.s"), transport, str(sockets))
        with socket.create_server((LOOPBACK, 0)) as unused:
            return GuestPlace(tcp_address(unused), transport, str(sockets))

    async def open(self, say: Callable[[str], None]) -> None:
        """Prepare all that engines need to start; ``say`` gets each line of progress, for people.

        Raises:
            UserError: A machine cannot be reached, or the machines have no room.
        """
        return

    async def leave(self) -> None:
        """Give back the machines that ``open`` has taken."""
        return

    def local_store(self, options: StoreOptions) -> StoreOptions:
        """Return the options of the store beside the front door."""
        return options

    def follow_peers(self, told: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        """Call ``told`` with the addresses of other machines' stores whenever these change."""
        return

    def nodes(self) -> list[NodeStatus]:
        """Return the nodes that engines run on; none if engines run on this machine."""
        return []

    def num_free_places(self) -> int | None:
        """Return how many more instances fit on the nodes; None on this machine: memory decides."""
        return None

    async def gained(self) -> list[str]:
        """Return the machines that the cluster gained since the last call, for ``add_node``."""
        return []

    async def add_node(
        self, address: str, vllm_argv: tuple[str, ...], say: Callable[[str], None]
    ) -> str:
        """Take one more machine, for instances that are added from now on; return its name.

        Args:
            vllm_argv: vLLM's options of engines that start now.
            say: Function called with a description of what is being waited for.

        Raises:
            UserError: The machine cannot be used; it is left unchanged.
        """
        raise UserError(NO_NODES)

    def hold_node(self, name: str, *, is_held: bool) -> None:
        """Stop placing instances on a node, or allow it again.

        Raises:
            UserError: There is no node of this name.
        """
        raise UserError(NO_NODES)

    async def remove_node(self, name: str) -> None:
        """Give back a node that has no instance.

        Raises:
            UserError: There is no node of this name.
            MigrationError: The node has instances.
        """
        raise UserError(NO_NODES)

    def place_of(self, instance_id: str) -> InstancePlace:
        """Return the instance's machine."""
        return InstancePlace()

    def distance(self, source: str, target: str) -> Distance | None:
        """Return the distance between the machines of two instances; None if it is unknown."""
        return None

    def has_lost_parent(self, instance_id: str) -> bool:
        """Return whether the engine's parent or machine is gone, which ends the engine, too."""
        return False

    def address_there(self, instance_id: str, address: str) -> str:
        """Return the address of an instance's socket, as the instance's machine knows it.

        Raises:
            InstanceDeadError: The instance's machine is away.
        """
        return address

    def devices_of(self, instance_id: str) -> str:
        """Return the instance's CUDA_VISIBLE_DEVICES; empty on CPU or on another machine."""
        return ""

    def reserve(self, instance_id: str) -> None:
        """Reserve devices or a place for an instance that is to be added; nothing on a CPU.

        Raises:
            MigrationError: None is free.
        """
        return

    def release(self, instance_id: str) -> None:
        """Release the devices or the place of an instance that has been removed."""
        return

    def turn_to_start(
        self, instance_id: str
    ) -> contextlib.AbstractAsyncContextManager[None, bool | None]:
        """Return a context within which no other instance starts on the GPUs of this one."""
        return contextlib.nullcontext()


class ForkLauncher(Launcher):
    """Launcher that orders forks from the engine parent, and replaces a lost parent.

    A parent that does not answer keeps its engines, which may be fine, and is ended after the last
    of them has ended.
    """

    def __init__(
        self, parent: ParentLink, start_parent: Callable[[], Awaitable[ParentLink]]
    ) -> None:
        self._parent = parent
        self._start_parent = start_parent
        self._retired: list[ParentLink] = []
        self._parents: dict[str, ParentLink] = {}
        self._replacing = asyncio.Lock()

    async def start(self, order: Order) -> int:
        parent, pid = await self._ordered(order)
        if isinstance(order, StartEngine):
            self._parents[order.instance_id] = parent
        return pid

    def has_lost_parent(self, instance_id: str) -> bool:
        parent = self._parents.get(instance_id)
        return parent is not None and not parent.is_running

    async def _ordered(self, order: Order) -> tuple[ParentLink, int]:
        """Return the parent that carried out ``order``, and the id of the started process."""
        await self._sweep()
        parent = self._parent
        try:
            return parent, await self._give(parent, order)
        except ParentLostError as lost:
            logger.warning("%s: another one is started", lost)
        try:
            parent = await self._other_than(parent)
            return parent, await self._give(parent, order)
        except ParentLostError as lost:
            raise InstanceDeadError(
                f"{lost}, and no other one can be started: see front.log in the run's folder"
            ) from lost

    @staticmethod
    async def _give(parent: ParentLink, order: Order) -> int:
        limited = msgspec.structs.replace(order, until_s=time.monotonic() + ORDER_S)
        return await in_daemon_thread(lambda: parent.order(limited))

    async def _other_than(self, lost: ParentLink) -> ParentLink:
        """Return the parent that follows ``lost``; the first caller starts it."""
        async with self._replacing:
            if self._parent is lost or self._parent.is_lost:
                parent = await self._start_parent()
                self._retired.append(self._parent)
                self._parent = parent
                metrics.PARENT_RESTARTS.inc()
            return self._parent

    async def _sweep(self) -> None:
        """End parents that were given up and have no engines left."""
        idle = [one for one in self._retired if not (one.is_running and one.has_engines)]
        self._retired = [one for one in self._retired if one not in idle]
        for one in idle:
            await in_daemon_thread(functools.partial(one.close, 0.0))

    def release(self, instance_id: str) -> None:
        self._parents.pop(instance_id, None)

    def close(self) -> None:
        for lost in self._retired:
            lost.close(patience_s=0.0)
        self._parent.close()


class SpawnLauncher(Launcher):
    """Launcher that starts a new Python process for each engine core.

    Args:
        vllm_argv: vLLM's options of engine cores that are started without their own.
        in_turn: True to start engines on one GPU one after the other: an engine that measures its
            memory counts as its own what others take meanwhile.
    """

    def __init__(self, vllm_argv: list[str], devices: Devices, *, in_turn: bool = False) -> None:
        self._vllm_argv = tuple(vllm_argv)
        self._devices = devices
        self._in_turn = in_turn
        self._turns: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        self._processes: list[subprocess.Popen[bytes]] = []

    def devices_of(self, instance_id: str) -> str:
        return self._devices.of(instance_id) or ""

    def reserve(self, instance_id: str) -> None:
        self._devices.reserve(instance_id)

    def release(self, instance_id: str) -> None:
        self._devices.release(instance_id)

    @contextlib.asynccontextmanager
    async def turn_to_start(self, instance_id: str) -> AsyncIterator[None]:
        devices = self.devices_of(instance_id) if self._in_turn else ""
        async with contextlib.AsyncExitStack() as stack:
            for name in sorted({name.strip() for name in devices.split(",") if name}):
                await stack.enter_async_context(self._turns[name])
            yield

    async def start(self, order: Order) -> int:
        beside = order.instance_id if isinstance(order, StartEngine) else order.address.target
        environment = dict(os.environ)
        if (devices := self._devices.of(beside)) is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        argv = order.vllm_argv or self._vllm_argv
        self._processes = [p for p in self._processes if p.poll() is None]
        process = spawn(msgspec.structs.replace(order, vllm_argv=argv), environment)
        self._processes.append(process)
        return process.pid

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
