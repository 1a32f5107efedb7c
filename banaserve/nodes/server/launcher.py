"""Launcher of engines and guests on other machines, through the agents of nodes."""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from banaserve.base.errors import InstanceDeadError, MigrationError, UserError
from banaserve.base.net.addresses import written
from banaserve.base.types import Distance
from banaserve.contracts.instances import NodeStatus
from banaserve.kvstore.daemon.options import StoreOptions
from banaserve.nodes.link import NodeLostError
from banaserve.nodes.messages import JoinSession, SessionOpened
from banaserve.nodes.places import Places
from banaserve.nodes.relay import SOCKET_NAMES
from banaserve.nodes.server import shim
from banaserve.nodes.server.assignment import room
from banaserve.nodes.server.client import NodeClient
from banaserve.nodes.server.pool import NodePool, NodeWork, OnPeers, PoolNode
from banaserve.serving.launch.launcher import GuestPlace, InstancePlace, Launcher
from banaserve.serving.launch.messages import Order, StartEngine, StartGuest
from banaserve.transport.registry import SHARED_MEMORY, TCP

LOOKUP_STORE_SIZE = "64MiB"
"""Size of the server's own store if all engines are on nodes: it only queries the other stores."""


class NodesLauncher(Launcher):
    """Launcher that starts each engine and guest on the node that its instance is assigned to.

    Args:
        places: Places of the agents.
        key: Key of the cluster.
        server: Name of this server for the nodes.

    Attributes:
        pool: Pool of the nodes, with the work that this server has for them.
    """

    def __init__(self, places: Places, key: str, work: NodeWork, server: str) -> None:
        self.pool = NodePool(places, key, work, server)
        self._key = key
        self._place: dict[str, PoolNode] = {}
        self._shims: list[subprocess.Popen[bytes]] = []

    # ---- the nodes

    async def open(self, say: Callable[[str], None]) -> None:
        """Take all nodes, assign instances to them, and start their stores."""
        assigned = await self.pool.open(say)
        for node, one in zip(self.pool.nodes, assigned, strict=True):
            self._place.update((str(instance_id), node) for instance_id, _ in one.instances)

    async def leave(self) -> None:
        """Give the nodes back: all processes of this server there end."""
        await self.pool.leave()

    def nodes(self) -> list[NodeStatus]:
        return [
            NodeStatus(
                name=node.name,
                state="leaving" if node.is_leaving else _state(node.client),
                instances=self._instances_of(node),
                num_free=self._free(node),
                num_gpus=len(node.facts.gpus),
                memory_bytes=node.facts.memory_bytes,
                problem="" if node.client.is_ready else node.client.problem,
            )
            for node in self.pool.nodes
        ]

    def num_free_places(self) -> int:
        return sum(max(0, self._free(node)) for node in self.pool.nodes if _takes(node))

    async def gained(self) -> list[str]:
        return await self.pool.places.gained()

    async def add_node(
        self, address: str, vllm_argv: tuple[str, ...], say: Callable[[str], None]
    ) -> str:
        fullest = max((len(self._instances_of(node)) for node in self.pool.nodes), default=0)
        node = await self.pool.add(address, vllm_argv, max(1, fullest), say)
        return node.name

    def hold_node(self, name: str, *, is_held: bool) -> None:
        self._named(name).is_leaving = is_held

    async def remove_node(self, name: str) -> None:
        node = self._named(name)
        if names := self._instances_of(node):
            raise MigrationError(f"node {name} has instances still: {', '.join(names)}")
        await self.pool.remove(node)

    def follow_peers(self, told: OnPeers) -> None:
        self.pool.follow(told)

    def _named(self, name: str) -> PoolNode:
        for node in self.pool.nodes:
            if node.name == name:
                return node
        have = ", ".join(node.name for node in self.pool.nodes)
        raise UserError(f"there is no node {name}: this server has {have}")

    def _instances_of(self, node: PoolNode) -> list[str]:
        return [name for name, its in self._place.items() if its is node]

    def _free(self, node: PoolNode) -> int:
        """Return how many more instances the node can have."""
        return room(node.facts, self.pool.work.need) - len(self._instances_of(node))

    def local_store(self, options: StoreOptions) -> StoreOptions:
        """Return options of the front door's store, which asks the others and holds nothing."""
        return replace(options, size=LOOKUP_STORE_SIZE, ssd=None, peers=self.pool.peers())

    # ---- instances

    def place_of(self, instance_id: str) -> InstancePlace:
        if (node := self._place.get(instance_id)) is None:
            return InstancePlace(is_local=False, is_there=False)
        return InstancePlace(node.name, node.store, is_local=False, is_there=node.client.is_ready)

    def distance(self, source: str, target: str) -> Distance | None:
        return self.pool.ways.distance(self.place_of(source).node, self.place_of(target).node)

    def has_lost_parent(self, instance_id: str) -> bool:
        return not self.place_of(instance_id).is_there

    def address_there(self, instance_id: str, address: str) -> str:
        opened = self._opened(instance_id)
        return f"ipc://{opened.folder}/{Path(address).name}"

    def _client_of(self, instance_id: str) -> NodeClient:
        return self._place[instance_id].client

    async def start(self, order: Order) -> int:
        if isinstance(order, StartEngine):
            return await self._start_engine(order)
        return await self._start_guest(order)

    async def _start_engine(self, wanted: StartEngine) -> int:
        digest = await self.pool.digest(wanted.vllm_argv)  # the node may be lost meanwhile
        instance_id = wanted.instance_id
        handshake = wanted.handshake_address.removeprefix("ipc://")
        stem = handshake.removesuffix(f".{SOCKET_NAMES[0]}")
        targets = {name: f"{stem}.{name}" for name in SOCKET_NAMES}
        order = JoinSession(
            self._opened(instance_id).incarnation,
            instance_id,
            Path(stem).name,
            vllm_argv=wanted.vllm_argv,
            model_digest=digest,
            instances=tuple(self._instances_of(self._place[instance_id])),
        )
        return self._start_shim(instance_id, order, targets, wanted.log_path)

    async def guest_place(
        self, host: str, target: str, guest_id: str, transport: str, sockets: Path
    ) -> GuestPlace:
        folder, here = self._opened(host).folder, self._client_of(host)
        there = self._client_of(target)
        if here is there and transport == SHARED_MEMORY:
            return GuestPlace(f"{folder}/{guest_id}.s", transport, folder, here.host)
        self._opened(target)
        try:
            port = await there.free_port()
        except NodeLostError as error:
            raise InstanceDeadError(str(error)) from error
        crossing = TCP if transport == SHARED_MEMORY else transport
        channel = f"tcp:{written(there.host, port)}"
        return GuestPlace(channel, crossing, folder, here.host, is_elsewhere=here is not there)

    async def _start_guest(self, wanted: StartGuest) -> int:
        digest = await self.pool.digest(wanted.vllm_argv)  # the node may be lost meanwhile
        target = wanted.address.target
        opened, listen_host = self._opened(target), self._client_of(target).host
        own = msgspec.structs.replace(wanted.address, folder=opened.folder, listen_host=listen_host)
        order = JoinSession(
            opened.incarnation,
            guest=msgspec.json.encode(own),
            vllm_argv=wanted.vllm_argv,
            model_digest=digest,
        )
        return self._start_shim(target, order, {}, wanted.log_path)

    def _opened(self, instance_id: str) -> SessionOpened:
        client = self._client_of(instance_id)
        if client.opened is None or not client.is_ready:
            raise InstanceDeadError(
                f"instance {instance_id}: node {client.name} is away: {client.problem}"
            )
        return client.opened

    def _start_shim(
        self, instance_id: str, order: JoinSession, targets: dict[str, str], log_path: str
    ) -> int:
        client = self._client_of(instance_id)
        launch = shim.ShimLaunch(client.place.host, client.place.port, self._key, order, targets)
        self._shims = [one for one in self._shims if one.poll() is None]
        process = shim.start(launch, Path(log_path))
        self._shims.append(process)
        return process.pid

    def reserve(self, instance_id: str) -> None:
        if instance_id in self._place or not self.pool.nodes:
            return
        here = [node for node in self.pool.nodes if _takes(node)]
        with_room = [node for node in here if self._free(node) > 0]
        if not with_room:
            raise MigrationError("no node has room for another instance")
        # Spread evenly, as at the start; of equal nodes, the one with most room left.
        had = {node: len(self._instances_of(node)) for node in with_room}
        self._place[instance_id] = min(with_room, key=lambda one: (had[one], -self._free(one)))

    def release(self, instance_id: str) -> None:
        self._place.pop(instance_id, None)

    def close(self) -> None:
        for process in self._shims:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


def _takes(node: PoolNode) -> bool:
    """Return whether instances may be added to the node."""
    return node.client.is_ready and not node.is_leaving


def _state(client: NodeClient) -> str:
    return "ready" if client.is_ready else "away"
