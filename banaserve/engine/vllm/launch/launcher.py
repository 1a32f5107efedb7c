"""Launchers of engine cores: fork from a pre-imported parent (CPU), or spawn (GPU)."""

from __future__ import annotations

import asyncio
import functools
import logging
import os
import signal
import socket
import subprocess
import time
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import NamedTuple, NoReturn, Protocol

import msgspec

from banaserve.engine.interface import NodeStatus
from banaserve.engine.vllm.launch import messages
from banaserve.engine.vllm.launch.devices import Devices
from banaserve.engine.vllm.launch.parent_link import ORDER_S, ParentLink, ParentLostError
from banaserve.engine.vllm.launch.spawn import LaunchKind, spawn
from banaserve.engine.vllm.migration.rpc.messages import GuestAddress
from banaserve.engine.vllm.monitoring import metrics
from banaserve.errors import InstanceDeadError, UserError
from banaserve.kvstore.daemon.options import StoreOptions
from banaserve.platform.processes import in_daemon_thread
from banaserve.transport.connect import tcp_address
from banaserve.transport.registry import SHARED_MEMORY
from banaserve.types import Distance

logger = logging.getLogger(__name__)
LOOPBACK = "127.0.0.1"


class GuestPlace(NamedTuple):
    """How a host reaches a guest: fields as in ``GuestAddress``."""

    channel: str
    transport: str
    folder: str
    listen_host: str = LOOPBACK
    is_elsewhere: bool = False


class Launcher(Protocol):
    """Starts engine cores; each handshakes with its instance over ``handshake_address``.

    ``vllm_argv`` are the options of an engine; empty are those that the launcher was made with.
    """

    async def start(
        self,
        instance_id: str,
        handshake_address: str,
        log_path: Path,
        vllm_argv: tuple[str, ...] = (),
    ) -> int:
        """Start one and return its process id."""
        ...

    async def guest_place(
        self, host: str, target: str, guest_id: str, transport: str, sockets: Path
    ) -> GuestPlace:
        """Where a guest beside ``target`` can be reached by instance ``host``.

        Args:
            transport: That is wished for.
            sockets: Private folder of the run.

        Raises:
            InstanceDeadError: A machine is away.
        """
        ...

    async def start_guest(
        self, address: GuestAddress, log_path: Path, vllm_argv: tuple[str, ...] = ()
    ) -> int:
        """Start a guest that answers at ``address`` and return its process id.

        Args:
            vllm_argv: Of its host.
        """
        ...

    async def open(self, say: Callable[[str], None]) -> None:
        """Make ready whatever engines need to start.

        Args:
            say: Called with each line for people.

        Raises:
            UserError: Machines cannot be reached, or have no room.
        """
        ...

    async def leave(self) -> None:
        """Give back what ``open`` has taken."""
        ...

    def local_store(self, options: StoreOptions) -> StoreOptions:
        """Options of the store beside the front door."""
        ...

    def follow_peers(self, told: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        """Tell this where the stores of other machines listen, each time that changes."""
        ...

    def nodes(self) -> list[NodeStatus]:
        """Machines that engines run on; none where that is this one."""
        ...

    def num_free_places(self) -> int | None:
        """For how many more instances they have room; None where this machine's memory decides."""
        ...

    async def gained(self) -> list[str]:
        """Machines that have come since this was asked last; ``add_node`` takes them."""
        ...

    async def add_node(
        self, address: str, vllm_argv: tuple[str, ...], say: Callable[[str], None]
    ) -> str:
        """Take one more machine, for instances that are added from now on; returns its name.

        Args:
            vllm_argv: Of engines that are started now.
            say: Called with what is waited for.

        Raises:
            UserError: It cannot be used, and is as it was.
        """
        ...

    def hold_node(self, name: str, *, is_held: bool) -> None:
        """Give a machine no more instances, or give it some again.

        Raises:
            UserError: There is none of this name.
        """
        ...

    async def remove_node(self, name: str) -> None:
        """Give back a machine that has no instance.

        Raises:
            UserError: There is none of this name.
            MigrationError: It has instances.
        """
        ...

    def is_local(self, instance_id: str) -> bool:
        """Whether the instance's process is this machine's, and not one that stands for it."""
        ...

    def node_of(self, instance_id: str) -> str:
        """Name of the instance's machine; empty for this one."""
        ...

    def distance(self, source: str, target: str) -> Distance | None:
        """Way from the machine of one instance to that of another; None where it is not known."""
        ...

    def store_of(self, instance_id: str) -> str:
        """``HOST:PORT`` of the store on the instance's machine, as its peers know it.

        Empty where that is the front door's store, or there is none.
        """
        ...

    def is_there(self, instance_id: str) -> bool:
        """Whether the instance's machine is: no engine can be started on one that is away."""
        ...

    def has_lost_parent(self, instance_id: str) -> bool:
        """Whether what the instance's engine cannot outlive has ended: its parent or machine."""
        ...

    def address_there(self, instance_id: str, address: str) -> str:
        """Address of a socket of the instance, as its own machine knows it.

        Raises:
            InstanceDeadError: That machine is away.
        """
        ...

    def devices_of(self, instance_id: str) -> str:
        """The instance's CUDA_VISIBLE_DEVICES; empty on CPU, and where they are elsewhere."""
        ...

    def reserve(self, instance_id: str) -> None:
        """Find devices for an instance that is to be added.

        Raises:
            MigrationError: None are free.
        """
        ...

    def release(self, instance_id: str) -> None:
        """The instance is there no more."""
        ...

    def close(self) -> None:
        """End every engine core and guest that is still there."""
        ...


class OnThisMachine:
    """What launchers of this machine's processes share."""

    async def open(self, say: Callable[[str], None]) -> None:
        """All is ready."""

    async def leave(self) -> None:
        """Nothing was taken."""

    def local_store(self, options: StoreOptions) -> StoreOptions:
        return options

    def follow_peers(self, told: Callable[[Sequence[str]], Awaitable[None]]) -> None:
        """They are those of the options, and stay."""

    def nodes(self) -> list[NodeStatus]:
        return []

    def num_free_places(self) -> int | None:
        return None

    async def gained(self) -> list[str]:
        return []

    async def add_node(
        self, address: str, vllm_argv: tuple[str, ...], say: Callable[[str], None]
    ) -> str:
        _refuse_nodes()

    def hold_node(self, name: str, *, is_held: bool) -> None:
        _refuse_nodes()

    async def remove_node(self, name: str) -> None:
        _refuse_nodes()

    def is_local(self, instance_id: str) -> bool:
        return True

    def node_of(self, instance_id: str) -> str:
        return ""

    def distance(self, source: str, target: str) -> Distance | None:
        return None

    def store_of(self, instance_id: str) -> str:
        return ""

    def is_there(self, instance_id: str) -> bool:
        return True

    def has_lost_parent(self, instance_id: str) -> bool:
        return False

    async def guest_place(
        self, host: str, target: str, guest_id: str, transport: str, sockets: Path
    ) -> GuestPlace:
        if transport == SHARED_MEMORY:
            return GuestPlace(str(sockets / f"{guest_id}.s"), transport, str(sockets))
        with socket.create_server((LOOPBACK, 0)) as unused:
            return GuestPlace(tcp_address(unused), transport, str(sockets))

    def address_there(self, instance_id: str, address: str) -> str:
        return address


def _refuse_nodes() -> NoReturn:
    raise UserError(
        "this server's engines run on its own machine: nodes join one that was started with --node "
        "or --cluster"
    )


class ForkLauncher(OnThisMachine):
    """Orders forks from the engine parent, and starts another parent in place of a lost one.

    A parent that does not answer keeps the engines that it has: they may be well. It is ended with
    the last of them.

    Args:
        parent: The first one.
        start_parent: Starts another one.
    """

    def __init__(
        self, parent: ParentLink, start_parent: Callable[[], Awaitable[ParentLink]]
    ) -> None:
        self._parent = parent
        self._start_parent = start_parent
        self._retired: list[ParentLink] = []
        self._parents: dict[str, ParentLink] = {}
        self._replacing = asyncio.Lock()

    async def start(
        self,
        instance_id: str,
        handshake_address: str,
        log_path: Path,
        vllm_argv: tuple[str, ...] = (),
    ) -> int:
        until_s = time.monotonic() + ORDER_S
        parent, pid = await self._ordered(
            messages.StartEngine(instance_id, handshake_address, str(log_path), vllm_argv, until_s)
        )
        self._parents[instance_id] = parent
        return pid

    def has_lost_parent(self, instance_id: str) -> bool:
        parent = self._parents.get(instance_id)
        return parent is not None and not parent.is_running

    async def start_guest(
        self, address: GuestAddress, log_path: Path, vllm_argv: tuple[str, ...] = ()
    ) -> int:
        until_s = time.monotonic() + ORDER_S
        order = messages.StartGuest(address, str(log_path), vllm_argv, until_s)
        _, pid = await self._ordered(order)
        return pid

    async def _ordered(self, order: messages.Order) -> tuple[ParentLink, int]:
        """The process that was started, and the parent that has started it."""
        await self._sweep()
        parent = self._parent
        try:
            return parent, await in_daemon_thread(lambda: parent.order(order))
        except ParentLostError as lost:
            logger.warning("%s: another one is started", lost)
        try:
            parent = await self._other_than(parent)
            again = msgspec.structs.replace(order, until_s=time.monotonic() + ORDER_S)
            return parent, await in_daemon_thread(lambda: parent.order(again))
        except ParentLostError as lost:
            raise InstanceDeadError(
                f"{lost}, and no other one can be started: see front.log in the run's folder"
            ) from lost

    async def _other_than(self, lost: ParentLink) -> ParentLink:
        """The parent after ``lost``; the first that asks starts it."""
        async with self._replacing:
            if self._parent is lost or self._parent.is_lost:
                parent = await self._start_parent()
                self._retired.append(self._parent)
                self._parent = parent
                metrics.PARENT_RESTARTS.inc()
            return self._parent

    async def _sweep(self) -> None:
        """End parents that were given up and have no engine any more."""
        idle = [one for one in self._retired if not (one.is_running and one.has_engines)]
        for one in idle:
            self._retired.remove(one)
            await in_daemon_thread(functools.partial(one.close, 0.0))

    def devices_of(self, instance_id: str) -> str:
        return ""

    def reserve(self, instance_id: str) -> None:
        """All share the machine's processors."""

    def release(self, instance_id: str) -> None:
        self._parents.pop(instance_id, None)

    def close(self) -> None:
        for lost in self._retired:
            lost.close(patience_s=0.0)
        self._parent.close()


class SpawnLauncher(OnThisMachine):
    """Starts a Python process for each engine core.

    Args:
        vllm_argv: The options of engine cores that are started without their own.
        devices: Of the instances, and those that are free.
    """

    def __init__(self, vllm_argv: list[str], devices: Devices) -> None:
        self._vllm_argv = vllm_argv
        self._devices = devices
        self._processes: list[subprocess.Popen[bytes]] = []

    def devices_of(self, instance_id: str) -> str:
        return self._devices.of(instance_id) or ""

    def reserve(self, instance_id: str) -> None:
        self._devices.reserve(instance_id)

    def release(self, instance_id: str) -> None:
        self._devices.release(instance_id)

    async def start(
        self,
        instance_id: str,
        handshake_address: str,
        log_path: Path,
        vllm_argv: tuple[str, ...] = (),
    ) -> int:
        argv = list(vllm_argv) or self._vllm_argv
        launch = messages.EngineLaunch(instance_id, argv, handshake_address, str(log_path))
        return self._spawn(LaunchKind.ENGINE, launch, self._environment(instance_id))

    async def start_guest(
        self, address: GuestAddress, log_path: Path, vllm_argv: tuple[str, ...] = ()
    ) -> int:
        launch = messages.GuestLaunch(address, list(vllm_argv) or self._vllm_argv, str(log_path))
        return self._spawn(LaunchKind.GUEST, launch, self._environment(address.target))

    def _environment(self, instance_id: str) -> dict[str, str]:
        environment = dict(os.environ)
        if (devices := self._devices.of(instance_id)) is not None:
            environment["CUDA_VISIBLE_DEVICES"] = devices
        return environment

    def _spawn(self, kind: LaunchKind, launch: msgspec.Struct, environment: dict[str, str]) -> int:
        self._processes = [p for p in self._processes if p.poll() is None]
        process = spawn(kind, launch, environment)
        self._processes.append(process)
        return process.pid

    def close(self) -> None:
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()
