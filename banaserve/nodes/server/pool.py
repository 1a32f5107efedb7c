"""Pool of nodes that a server has taken: the first ones, those that join and those that leave."""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

import msgspec

from banaserve.base.errors import UserError
from banaserve.base.net.addresses import written
from banaserve.base.tasks import end_tasks
from banaserve.base.types import InstanceId, Role
from banaserve.contracts.environment import GRAPHS_VARIABLE
from banaserve.kvstore.daemon.options import PeerOptions, StoreOptions
from banaserve.nodes.credentials import ClusterCredentials
from banaserve.nodes.link import NodeLostError
from banaserve.nodes.measuring import inspected
from banaserve.nodes.messages import Inspect, NodeStore, PrepareNode, own_version
from banaserve.nodes.model_check import model_digest
from banaserve.nodes.places import AgentPlace, NumberedPlace, Places
from banaserve.nodes.server.assignment import (
    InstanceNeed,
    NodeAssignment,
    NodeFacts,
    assign,
    no_room,
    room,
)
from banaserve.nodes.server.client import RETRY_S, NodeClient
from banaserve.nodes.server.ways import NodeWays
from banaserve.serving.monitoring import metrics

logger = logging.getLogger(__name__)
OnPeers = Callable[[Sequence[str]], Awaitable[None]]
"""Called with the addresses of the stores of all nodes, each time they change."""


@dataclass(frozen=True, slots=True)
class NodeWork:
    """Work that a server has for its nodes.

    Attributes:
        instances: Ids and roles of the instances at the start.
        need: Resources that each instance needs.
        vllm_argv: vLLM options of engines that are started without options of their own.
        forks: True if engines are forked, which is possible on CPU only.
        threads: OMP threads of an engine; 0 shares a node's processors among its engines.
        store: Options of each node's store; None for no store.
    """

    instances: Sequence[tuple[InstanceId, Role]]
    need: InstanceNeed
    vllm_argv: tuple[str, ...]
    forks: bool
    threads: int
    store: StoreOptions | None


class PoolNode:
    """Node that this server has taken.

    Args:
        number: Number by which ``Places.find`` finds the node's agent again.
        facts: Resources of the node for instances.
        order: Order that prepares the node for instances.

    Attributes:
        is_leaving: True if the node gets no more instances.
    """

    def __init__(
        self, client: NodeClient, number: int, facts: NodeFacts, order: PrepareNode
    ) -> None:
        self.client = client
        self.number = number
        self.facts = facts
        self.order = order
        self.is_leaving = False
        self.keeper: asyncio.Task[None] | None = None

    @property
    def name(self) -> str:
        """Return the display name of the node, ``HOST:PORT``."""
        return self.client.name

    @property
    def store(self) -> str:
        """Return ``HOST:PORT`` of the node's store; empty for no store."""
        return self.order.store.listen if self.order.store is not None else ""


class NodePool:
    """Pool that takes nodes, takes lost ones again, and gives them back.

    Args:
        places: Places of the agents.
        key: Key of the cluster.
        server: Name of this server for the nodes.

    Attributes:
        nodes: All nodes that have been taken, including those that are away at present.
        ways: Measured distances between the nodes.
    """

    def __init__(self, places: Places, key: str, work: NodeWork, server: str) -> None:
        self.nodes: list[PoolNode] = []
        self._credentials = ClusterCredentials.of(key)
        self.ways = NodeWays(self._credentials)
        self.places = places
        self.work = work
        self._server = server
        self._store_key = secrets.token_hex(32)
        self._on_peers: OnPeers | None = None
        self._measuring: asyncio.Task[None] | None = None

    # ---- the first ones

    async def open(self, say: Callable[[str], None]) -> list[NodeAssignment]:
        """Take all nodes, assign instances to them, and start their stores.

        Raises:
            UserError: A node cannot be reached or used, or the nodes have no room for the
                instances.
        """
        clients = [self._client(place) for place in await self.places.open(say)]
        say(f"taking nodes {', '.join(client.name for client in clients)}")
        try:
            assigned = await self._open(clients, say)
        except BaseException:
            await asyncio.gather(*(client.close() for client in clients))
            raise
        for node in self.nodes:
            node.keeper = asyncio.create_task(self._keep(node))
        self._measuring = asyncio.create_task(self.ways.keep_measuring(self._clients))
        return assigned

    async def _open(
        self, clients: Sequence[NodeClient], say: Callable[[str], None]
    ) -> list[NodeAssignment]:
        lost: list[BaseException] = []
        try:
            async with asyncio.TaskGroup() as group:
                taken = [group.create_task(_taken(client)) for client in clients]
            facts = [one.result() for one in taken]
            assigned = assign(facts, self.work.instances, self.work.need)
            digest, argv = await self.digest(()), self.work.vllm_argv
            for client, its, one in zip(clients, facts, assigned, strict=True):
                order = await self._order(client, argv, len(one.instances), digest)
                self.nodes.append(PoolNode(client, len(self.nodes), its, order))
                names = ", ".join(instance_id for instance_id, _ in one.instances)
                say(f"node {one.node}: {names or 'no instance'}")
            async with asyncio.TaskGroup() as group:
                for node in self.nodes:
                    group.create_task(node.client.prepare(node.order))
            await self._share_stores()
        except* NodeLostError as failures:
            lost += failures.exceptions
        if lost:  # raised above, Python 3.11.2 puts it into a group
            raise UserError(str(lost[0]))
        return assigned

    def _client(self, place: AgentPlace) -> NodeClient:
        return NodeClient(place, self._credentials, self._server, metrics.STORE_RESTARTS.inc)

    def _clients(self) -> list[NodeClient]:
        return [node.client for node in self.nodes]

    async def _order(
        self, client: NodeClient, vllm_argv: tuple[str, ...], num_instances: int, digest: str
    ) -> PrepareNode:
        """Return the order that prepares a node; its store is told its peers afterwards."""
        store = None
        if (options := self.work.store) is not None:
            store = NodeStore(
                size=options.size,
                ssd=str(options.ssd) if options.ssd is not None else "",
                ssd_size=options.ssd_size,
                distributed=options.distributed,
                tenant_quota=options.tenant_quota,
                kept_quota=options.kept_quota,
                verify_memory=options.verify_memory,
                listen=written(client.host, await client.free_port()),
                peers=(),
                key=self._store_key,
            )
        return PrepareNode(
            vllm_argv=vllm_argv,
            forks=self.work.forks,
            environment={
                "OMP_NUM_THREADS": str(self._threads(client, num_instances)),
                **{n: os.environ[n] for n in (GRAPHS_VARIABLE,) if n in os.environ},
            },
            devices_each=self.work.need.num_gpus,
            store=store,
            model_digest=digest,
        )

    def _threads(self, client: NodeClient, num_instances: int) -> int:
        processors = client.opened.num_processors if client.opened is not None else 1
        return self.work.threads or max(1, processors // max(1, num_instances))

    async def digest(self, vllm_argv: tuple[str, ...]) -> str:
        """Return the digest of the model's files; empty options stand for those of the start."""
        return await asyncio.to_thread(model_digest, vllm_argv or self.work.vllm_argv)

    # ---- kept

    async def _keep(self, node: PoolNode) -> None:
        """Take a node again each time it is lost: its processes have ended, and it begins empty."""
        client = node.client
        while True:
            await client.wait_lost()
            logger.warning("node %s is away: %s", client.name, client.problem)
            while not client.is_ready:
                await asyncio.sleep(RETRY_S)
                try:
                    client.place = await self.places.find(node.number)
                    await client.open()
                    digest = await self.digest(node.order.vllm_argv)  # files may have been replaced
                    order = msgspec.structs.replace(node.order, model_digest=digest)
                    node.order = await _at_home(order, client)
                    await client.prepare(node.order)
                    logger.info("node %s is back", client.name)
                    await self._share_stores()
                except Exception as error:
                    if not isinstance(error, (NodeLostError, UserError)):
                        logger.exception("taking node %s again", client.name)
                    await client.close()  # a session left open would keep the next one out
                    client.problem = str(error)

    async def leave(self) -> None:
        """Give the nodes back: all processes of this server there end."""
        await end_tasks(self._measuring, *(node.keeper for node in self.nodes))
        await asyncio.gather(*(client.close() for client in self._clients()))
        await self.places.close()

    # ---- joining and leaving

    async def add(
        self,
        address: str,
        vllm_argv: tuple[str, ...],
        num_instances: int,
        say: Callable[[str], None],
    ) -> PoolNode:
        """Take one more node, after the same checks as at the start.

        Args:
            address: Address of the node, as given by the user.
            vllm_argv: vLLM options of the node's engines; empty for the options of the start.
            num_instances: Number of instances that share the node's processors.
            say: Called with a line on what is being waited for.

        Raises:
            UserError: The node cannot be reached, is known already, or cannot be used.
        """
        say(f"looking for {address}")
        self._refuse_known(address)
        found = await self.places.add(address)
        client = self._client(found.place)
        try:
            node = await self._joined(client, found, vllm_argv, num_instances, say)
        except BaseException as error:
            await client.close()
            await self.places.drop(found.number)
            if isinstance(error, NodeLostError):
                raise UserError(str(error)) from error
            raise
        others = [one.client for one in self.nodes if one.client.is_ready]
        self.nodes.append(node)
        node.keeper = asyncio.create_task(self._keep(node))
        try:
            await self._share_stores()
            say("measuring the ways to the other nodes")
            await self.ways.measure_to(client, others)
        except BaseException:  # also where the caller has given up
            await self.remove(node)
            raise
        return node

    def _refuse_known(self, address: str) -> None:
        if any(address == node.name for node in self.nodes):
            raise UserError(f"node {address} is one of this server's already")

    async def _joined(
        self,
        client: NodeClient,
        found: NumberedPlace,
        vllm_argv: tuple[str, ...],
        num_instances: int,
        say: Callable[[str], None],
    ) -> PoolNode:
        self._refuse_known(client.name)
        argv = vllm_argv or self.work.vllm_argv
        digest = await self.digest(argv)
        await self._check_new(client, Inspect(argv, digest))
        facts = await _taken(client)
        if room(facts, self.work.need) < 1:
            raise UserError(f"node {client.name} has no room: {no_room(facts, self.work.need)}")
        order = await self._order(client, argv, num_instances, digest)
        say(f"preparing node {client.name}")
        await client.prepare(order)
        return PoolNode(client, found.number, facts, order)

    async def _check_new(self, client: NodeClient, asked: Inspect) -> None:
        """Check a node before it is taken.

        Raises:
            UserError: The node cannot be used.
        """
        report = await inspected(client.place, self._credentials, asked)
        if (found := report.found) is None:
            raise UserError(report.problem)
        if found.server == self._server:
            raise UserError(f"node {client.name} is one of this server's already")
        if found.server:
            raise UserError(f"node {client.name} is used by another server, {found.server}")
        if found.version != own_version():
            raise UserError(
                f"node {client.name} has {found.version}, this server {own_version()}: "
                "install the same on both"
            )
        if found.model_problem:
            raise UserError(f"node {client.name}: {found.model_problem}")

    async def remove(self, node: PoolNode) -> None:
        """Give a node back; all processes of this server that still run there end."""
        self.nodes.remove(node)
        await end_tasks(node.keeper)
        await node.client.close()
        await self.places.drop(node.number)
        await self._share_stores()

    # ---- stores

    def stores(self) -> list[str]:
        """Return ``HOST:PORT`` of the stores of all nodes."""
        return [node.store for node in self.nodes if node.store]

    def peers(self) -> PeerOptions:
        """Return the peer options of a store that is on none of the nodes."""
        return PeerOptions(peers=tuple(self.stores()), key=self._store_key)

    def follow(self, on_peers: OnPeers) -> None:
        """Call ``on_peers``, too, each time the stores change."""
        self._on_peers = on_peers

    async def _share_stores(self) -> None:
        """Let each store fetch blocks from all other stores of the present nodes."""
        if self.work.store is None:
            return
        for node in list(self.nodes):
            assert node.order.store is not None
            # Computed anew for each node: another may have joined while the previous one was told.
            peers = [one.store for one in self.nodes if one is not node]
            store = msgspec.structs.replace(node.order.store, peers=tuple(peers))
            node.order = msgspec.structs.replace(node.order, store=store)
            if node.client.is_ready:
                try:
                    await node.client.set_store_peers(peers)
                except NodeLostError as error:  # the node is told when it is back
                    logger.warning("%s", error)
        if self._on_peers is not None:
            await self._on_peers(self.stores())


async def _taken(client: NodeClient) -> NodeFacts:
    opened = await client.open()
    return NodeFacts(client.name, opened.gpus, opened.memory_bytes)


async def _at_home(order: PrepareNode, client: NodeClient) -> PrepareNode:
    """Return the order with its store at a free port of the node's present host."""
    if order.store is None:
        return order
    listen = written(client.host, await client.free_port())  # the port of before may be taken
    return msgspec.structs.replace(order, store=msgspec.structs.replace(order.store, listen=listen))
