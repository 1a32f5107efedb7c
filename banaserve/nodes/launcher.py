"""Launcher of engines and guests on other machines, through the agents of nodes."""

from __future__ import annotations

import asyncio
import logging
import secrets
import signal
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import msgspec

from banaserve.engine.vllm.launch.launcher import GuestPlace
from banaserve.engine.vllm.migration.rpc.messages import GuestAddress
from banaserve.engine.vllm.monitoring import metrics
from banaserve.errors import InstanceDeadError, MigrationError, UserError
from banaserve.kvstore.daemon.options import StoreOptions
from banaserve.kvstore.peers.options import PeerOptions
from banaserve.net.addresses import host_and_port, written
from banaserve.nodes import shim
from banaserve.nodes.assignment import InstanceNeed, NodeAssignment, NodeFacts, assign, room
from banaserve.nodes.client import RETRY_S, NodeClient
from banaserve.nodes.credentials import ClusterCredentials
from banaserve.nodes.link import NodeLostError
from banaserve.nodes.messages import JoinSession, NodeStore, PrepareNode, SessionOpened
from banaserve.nodes.model_check import model_digest
from banaserve.nodes.places import Places
from banaserve.nodes.remote_process import SOCKET_NAMES
from banaserve.nodes.ways import NodeWays
from banaserve.transport.registry import SHARED_MEMORY, TCP
from banaserve.types import Distance, InstanceId, Role

logger = logging.getLogger(__name__)
LOOKUP_STORE_SIZE = "64MiB"
"""Of the server's own store where all engines are elsewhere: it only asks the others."""


@dataclass(frozen=True, slots=True)
class NodeWork:
    """What a server wants of its nodes.

    Attributes:
        instances: Ids and roles at the start.
        need: Of each.
        vllm_argv: Options of engines that are started without their own.
        forks: Whether engines are forked, which only those on CPU can be.
        threads: OMP threads of an engine; 0 shares a node's processors among its engines.
        store: Of each node; None for no store.
    """

    instances: Sequence[tuple[InstanceId, Role]]
    need: InstanceNeed
    vllm_argv: tuple[str, ...]
    forks: bool
    threads: int
    store: StoreOptions | None


class NodesLauncher:
    """Starts each engine and guest on the node that its instance has been assigned to.

    Args:
        places: Where the agents are.
        key: Of the cluster.
        server: Name of this server for the nodes.
    """

    def __init__(self, places: Places, key: str, work: NodeWork, server: str) -> None:
        self._credentials = ClusterCredentials.of(key)
        self._places = places
        self._key = key
        self._work = work
        self._server = server
        self._clients: list[NodeClient] = []
        self._orders: dict[str, PrepareNode] = {}
        self._facts: dict[NodeClient, NodeFacts] = {}
        self._place: dict[str, NodeClient] = {}
        self._devices: dict[str, str] = {}
        self._keepers: list[asyncio.Task[None]] = []
        self._shims: list[subprocess.Popen[bytes]] = []
        self._peers = PeerOptions()
        self._ways = NodeWays(self._credentials)

    # ---- the nodes

    async def open(self, say: Callable[[str], None]) -> None:
        """Take all nodes, assign instances to them, and start their stores.

        Raises:
            UserError: A node cannot be reached or used, or they have no room for the instances.
        """
        self._clients = [
            NodeClient(place, self._credentials, self._server, metrics.STORE_RESTARTS.inc)
            for place in await self._places.open(say)
        ]
        say(f"taking nodes {', '.join(client.name for client in self._clients)}")
        try:
            async with asyncio.TaskGroup() as group:
                for client in self._clients:
                    group.create_task(self._take(client))
            facts = [self._facts[client] for client in self._clients]
            assigned = assign(facts, self._work.instances, self._work.need)
            await self._make_orders(assigned)
            for one in assigned:
                names = ", ".join(instance_id for instance_id, _ in one.instances)
                say(f"node {one.node}: {names or 'no instance'}")
            async with asyncio.TaskGroup() as group:
                for client in self._clients:
                    group.create_task(client.prepare(self._orders[client.name]))
        except* NodeLostError as failures:
            raise UserError(str(failures.exceptions[0])) from None
        kept = enumerate(self._clients)
        self._keepers = [asyncio.create_task(self._keep(*one)) for one in kept]
        self._keepers.append(asyncio.create_task(self._ways.keep_measuring(self._clients)))

    async def _take(self, client: NodeClient) -> None:
        opened = await client.open()
        self._facts[client] = NodeFacts(client.name, opened.gpus, opened.memory_bytes)

    async def _make_orders(self, assigned: Sequence[NodeAssignment]) -> None:
        clients = {client.name: client for client in self._clients}
        digest = await self._digest(())
        stores: dict[str, str] = {}
        if self._work.store is not None:
            for client in self._clients:
                stores[client.name] = written(client.host, await client.free_port())
        self._peers = PeerOptions(peers=tuple(stores.values()), key=secrets.token_hex(32))
        for one in assigned:
            client = clients[one.node]
            ids = [str(instance_id) for instance_id, _ in one.instances]
            self._place.update(dict.fromkeys(ids, client))
            devices = dict(zip(ids, one.devices, strict=False))
            self._devices.update(devices)
            self._orders[client.name] = PrepareNode(
                vllm_argv=self._work.vllm_argv,
                forks=self._work.forks,
                environment={"OMP_NUM_THREADS": str(self._threads(client, len(ids)))},
                devices=devices,
                devices_each=self._work.need.num_gpus,
                store=self._store_of(client, stores),
                model_digest=digest,
            )

    def _threads(self, client: NodeClient, num_instances: int) -> int:
        processors = client.opened.num_processors if client.opened is not None else 1
        return self._work.threads or max(1, processors // max(1, num_instances))

    def _store_of(self, client: NodeClient, stores: Mapping[str, str]) -> NodeStore | None:
        if (options := self._work.store) is None:
            return None
        return NodeStore(
            size=options.size,
            ssd=str(options.ssd) if options.ssd is not None else "",
            ssd_size=options.ssd_size,
            distributed=options.distributed,
            tenant_quota=options.tenant_quota,
            verify_memory=options.verify_memory,
            listen=stores[client.name],
            peers=tuple(where for name, where in stores.items() if name != client.name),
            key=self._peers.key,
        )

    async def _keep(self, number: int, client: NodeClient) -> None:
        """Take a node again that was lost: what ran there has ended, and begins empty."""
        order = self._orders[client.name]
        while True:
            await client.wait_lost()
            logger.warning("node %s is away: %s", client.name, client.problem)
            while not client.is_ready:
                await asyncio.sleep(RETRY_S)
                try:
                    client.place = await self._places.find(number)
                    await client.open()
                    await client.prepare(_at_home(order, client))
                except (NodeLostError, UserError) as error:
                    client.problem = str(error)
                else:
                    logger.info("node %s is back", client.name)

    async def leave(self) -> None:
        """Give the nodes back: what runs there for this server ends."""
        for keeper in self._keepers:
            keeper.cancel()
        await asyncio.gather(*self._keepers, return_exceptions=True)
        await asyncio.gather(*(client.close() for client in self._clients))
        await self._places.close()

    def local_store(self, options: StoreOptions) -> StoreOptions:
        """The store beside the front door asks those of the nodes, and holds nothing."""
        return replace(options, size=LOOKUP_STORE_SIZE, ssd=None, peers=self._peers)

    # ---- instances

    def is_local(self, instance_id: str) -> bool:
        return False

    def node_of(self, instance_id: str) -> str:
        client = self._place.get(instance_id)
        return client.name if client is not None else ""

    def distance(self, source: str, target: str) -> Distance | None:
        return self._ways.distance(self.node_of(source), self.node_of(target))

    def is_there(self, instance_id: str) -> bool:
        client = self._place.get(instance_id)
        return client is not None and client.is_ready

    def address_there(self, instance_id: str, address: str) -> str:
        opened = self._opened(instance_id)
        return f"ipc://{opened.folder}/{Path(address).name}"

    def _node_of(self, instance_id: str) -> NodeClient:
        return self._place[instance_id]

    async def start(
        self,
        instance_id: str,
        handshake_address: str,
        log_path: Path,
        vllm_argv: tuple[str, ...] = (),
    ) -> int:
        handshake = handshake_address.removeprefix("ipc://")
        stem = handshake.removesuffix(f".{SOCKET_NAMES[0]}")
        targets = {name: f"{stem}.{name}" for name in SOCKET_NAMES}
        digest = await self._digest(vllm_argv)
        order = JoinSession(
            self._opened(instance_id).incarnation,
            instance_id,
            Path(stem).name,
            vllm_argv=vllm_argv,
            model_digest=digest,
        )
        return self._start_shim(instance_id, order, targets, log_path)

    async def guest_place(
        self, host: str, target: str, guest_id: str, transport: str, sockets: Path
    ) -> GuestPlace:
        folder, here = self._opened(host).folder, self._node_of(host)
        there = self._node_of(target)
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

    async def start_guest(
        self, address: GuestAddress, log_path: Path, vllm_argv: tuple[str, ...] = ()
    ) -> int:
        opened = self._opened(address.target)
        own = msgspec.structs.replace(
            address, folder=opened.folder, listen_host=self._node_of(address.target).host
        )
        order = JoinSession(
            opened.incarnation,
            guest=msgspec.json.encode(own),
            vllm_argv=vllm_argv,
            model_digest=await self._digest(vllm_argv),
        )
        return self._start_shim(address.target, order, {}, log_path)

    async def _digest(self, vllm_argv: tuple[str, ...]) -> str:
        """Of the files of the model that these options name, or those that all were made with."""
        return await asyncio.to_thread(model_digest, vllm_argv or self._work.vllm_argv)

    def _opened(self, instance_id: str) -> SessionOpened:
        client = self._node_of(instance_id)
        if client.opened is None or not client.is_ready:
            raise InstanceDeadError(
                f"instance {instance_id}: node {client.name} is away: {client.problem}"
            )
        return client.opened

    def _start_shim(
        self, instance_id: str, order: JoinSession, targets: dict[str, str], log_path: Path
    ) -> int:
        client = self._node_of(instance_id)
        launch = shim.ShimLaunch(client.place.host, client.place.port, self._key, order, targets)
        self._shims = [one for one in self._shims if one.poll() is None]
        process = shim.start(launch, log_path)
        self._shims.append(process)
        return process.pid

    def devices_of(self, instance_id: str) -> str:
        """None here: NVML knows the GPUs of this machine alone."""
        return ""

    def reserve(self, instance_id: str) -> None:
        if instance_id in self._place or not self._facts:
            return
        had = dict.fromkeys(self._facts, 0)
        for client in self._place.values():
            had[client] += 1
        free = {one: room(facts, self._work.need) - had[one] for one, facts in self._facts.items()}
        here = [client for client in self._clients if client.is_ready]
        chosen = max(here, key=lambda client: (free[client], -had[client]), default=None)
        if chosen is None or free[chosen] < 1:
            raise MigrationError("no node has room for another instance")
        self._place[instance_id] = chosen

    def release(self, instance_id: str) -> None:
        self._place.pop(instance_id, None)

    def close(self) -> None:
        for process in self._shims:
            if process.poll() is None:
                process.send_signal(signal.SIGKILL)
            process.wait()


def _at_home(order: PrepareNode, client: NodeClient) -> PrepareNode:
    """An order for a node that may be another machine than the one that it was made for."""
    if order.store is None:
        return order
    port = host_and_port("store", order.store.listen)[1]
    store = msgspec.structs.replace(order.store, listen=written(client.host, port))
    return msgspec.structs.replace(order, store=store)
