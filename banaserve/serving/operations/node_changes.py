"""Nodes that join or leave a running server, one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from banaserve.base.clock import Clock
from banaserve.base.errors import MigrationError, UserError
from banaserve.base.tasks import end_tasks
from banaserve.base.types import InstanceId
from banaserve.contracts.instances import NodeChange, NodeStatus
from banaserve.serving.instances.cluster import Cluster
from banaserve.serving.launch.launcher import NO_NODES, Launcher
from banaserve.serving.operation_base import Operations
from banaserve.serving.operations.scaler import Scaler

logger = logging.getLogger(__name__)
LOOK_S = 5.0
_GIVING_BACK = "giving it back"


class NodeChanges(Operations[NodeChange]):
    """Additions and removals of nodes.

    A joining node is checked like the nodes at the server's start. It has no instance at first; the
    next instance that a person or the policy adds is placed there. A leaving node gets no more
    instances, and is given back once its instances have been removed.
    """

    def __init__(self, launcher: Launcher, scaler: Scaler, cluster: Cluster, clock: Clock) -> None:
        super().__init__("change", "n", clock)
        self._launcher = launcher
        self._scaler = scaler
        self._cluster = cluster
        self._looking: asyncio.Task[None] | None = None

    def nodes(self) -> list[NodeStatus]:
        """Return all nodes of the server; none if its engines run on its own machine."""
        return self._launcher.nodes()

    def start(self) -> None:
        """Start looking for machines that the cluster gains."""
        if self.nodes():
            self._looking = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """Cancel the running change, if there is one."""
        await end_tasks(self._looking)
        await super().stop()

    def begin_add(self, address: str, why: str = "") -> NodeChange:
        """Begin to add a node.

        Args:
            why: Reason for an addition that no person requested; empty otherwise.

        Raises:
            MigrationError: Another change is running.
            UserError: The engines of this server run on its own machine.
        """
        self._check_free()
        if not self.nodes():
            raise UserError(NO_NODES)
        change = NodeChange(self._new_id(), address, "add", "joining", why=why)
        self._carry_out(change, self._add(change))
        return change

    def begin_remove(self, name: str, timeout_s: float, *, are_replaced: bool) -> NodeChange:
        """Begin to drain a node and to give it back.

        Args:
            timeout_s: Maximum time for each of its instances to end its requests, in seconds.
            are_replaced: True to add as many instances on other nodes first.

        Raises:
            MigrationError: The node cannot be removed at present.
            UserError: There is no such node.
        """
        self._check_free()
        self._launcher.hold_node(name, is_held=True)
        try:
            if len(self.nodes()) == 1:
                raise MigrationError(f"node {name} is the server's last one: add another one first")
            scaling_id = self._begin_leaving(name, timeout_s, are_replaced)
        except BaseException:
            self._launcher.hold_node(name, is_held=False)
            raise
        change = NodeChange(self._new_id(), name, "remove", "leaving")
        self._carry_out(change, self._remove(change, scaling_id))
        return change

    def _check_free(self) -> None:
        if last := self.under_way:
            raise MigrationError(
                f"node {last.node} is {last.state}: wait for the end of {last.id}, or abort it"
            )

    def _begin_leaving(self, name: str, timeout_s: float, are_replaced: bool) -> str:
        """Begin to remove a node's instances; return the scaling's id, or nothing without any."""
        node = next(node for node in self.nodes() if node.name == name)
        leaving = [InstanceId(one) for one in node.instances if one in self._cluster.instances]
        if not leaving:
            return ""
        try:
            return self._scaler.begin_leaving(
                leaving, timeout_s, f"node {name}", are_replaced=are_replaced
            ).id
        except MigrationError as refused:
            raise MigrationError(
                f"node {name} has instances still ({', '.join(leaving)}): {refused}"
            ) from None

    def _abort(self, state: NodeChange) -> None:
        if state.now == _GIVING_BACK:
            raise MigrationError(f"node {state.node} is being given back: too late to abort")
        self._cancel(state)

    def _end(self, state: NodeChange, ending: str, reason: str) -> None:
        super()._end(state, ending, reason)
        state.now = ""
        logger.info("%s node %s: %s %s", state.action, state.node, ending, reason)

    async def _add(self, change: NodeChange) -> None:
        def say(words: str) -> None:
            change.now = words

        settings = self._cluster.newest_settings
        change.node = await self._launcher.add_node(change.node, settings.argv, say)

    async def _remove(self, change: NodeChange, scaling_id: str) -> None:
        name = change.node
        try:
            if scaling_id:
                change.now = f"its instances leave ({scaling_id})"
                await self._wait_left(name, scaling_id)
            change.now = _GIVING_BACK
            await self._launcher.remove_node(name)
        except BaseException:
            if any(node.name == name for node in self.nodes()):
                self._launcher.hold_node(name, is_held=False)
            raise

    async def _wait_left(self, name: str, scaling_id: str) -> None:
        try:
            scaling = await self._scaler.wait(scaling_id)
        except asyncio.CancelledError:
            with contextlib.suppress(MigrationError):  # the scaling has just ended
                self._scaler.abort(scaling_id)
            await self._scaler.wait(scaling_id)
            raise
        if scaling.state != "done":
            why = scaling.reason or f"scaling {scaling_id} was given up"
            raise MigrationError(f"node {name} has instances still: {why}")

    async def _look(self) -> None:
        while True:
            await self._clock.sleep(LOOK_S)
            try:
                for address in await self._launcher.gained():
                    await self._take(address)
            except Exception:
                logger.exception("nodes that the cluster gains")

    async def _take(self, address: str) -> None:
        while open_one := self.under_way:
            await self.wait(open_one.id)
        change = await self.wait(self.begin_add(address, "the cluster has gained it").id)
        if change.state != "done":
            logger.warning(
                "node %s, which the cluster has gained, is not used: %s", address, change.reason
            )
