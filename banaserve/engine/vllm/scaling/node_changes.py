"""Nodes that join a server that serves, and nodes that leave it: one at a time."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
from collections.abc import Coroutine
from typing import Any

from banaserve.clock import Clock
from banaserve.engine.interface import NodeChange, NodeStatus
from banaserve.engine.vllm.cluster import Cluster
from banaserve.engine.vllm.launch.launcher import Launcher
from banaserve.engine.vllm.scaling.scaler import Scaler
from banaserve.errors import BanaServeError, MigrationError, UserError
from banaserve.types import InstanceId

logger = logging.getLogger(__name__)
LOOK_S = 5.0
_KEPT = 200


class NodeChanges:
    """Adds and removes nodes.

    A node that joins is checked like those of the start, and has no instance at first: it is where
    the next one is added, by a person or by the policy. One that leaves is given no more, and given
    back once its instances have been removed.

    Args:
        scaler: Removes the instances of a node that leaves.
    """

    def __init__(self, launcher: Launcher, scaler: Scaler, cluster: Cluster, clock: Clock) -> None:
        self._launcher = launcher
        self._scaler = scaler
        self._cluster = cluster
        self._clock = clock
        self._numbers = itertools.count(1)
        self._changes: dict[str, NodeChange] = {}
        self._task: asyncio.Task[None] | None = None
        self._looking: asyncio.Task[None] | None = None
        self._began_s = 0.0

    def nodes(self) -> list[NodeStatus]:
        """All that the server has; none where its engines run on its own machine."""
        return self._launcher.nodes()

    def start(self) -> None:
        """Begin to look for machines that the cluster gains."""
        if self.nodes():
            self._looking = asyncio.create_task(self._look())

    async def stop(self) -> None:
        """Give up the change under way, if there is one."""
        tasks = [task for task in (self._looking, self._task) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- requests

    def begin_add(self, address: str, why: str = "") -> NodeChange:
        """Begin to take a node.

        Args:
            why: Who wants it; empty for a person.

        Raises:
            MigrationError: It cannot be done at present.
            UserError: Engines of this server run on its own machine.
        """
        self._check_free()
        if not self.nodes():
            raise UserError(
                "this server's engines run on its own machine: nodes join one that was started "
                "with --node or --cluster"
            )
        change = self._new(address, "add", "joining", why)
        self._run(change, self._add(change))
        return change

    def begin_remove(self, name: str, timeout_s: float, *, are_replaced: bool) -> NodeChange:
        """Begin to drain a node and to give it back.

        Args:
            timeout_s: For the last request of each of its instances.
            are_replaced: As many instances are added on other nodes first.

        Raises:
            MigrationError: It cannot be done at present.
            UserError: There is no such node.
        """
        self._check_free()
        self._launcher.hold_node(name, is_held=True)
        scaling_id = ""
        try:
            if len(self.nodes()) == 1:
                raise MigrationError(f"node {name} is the server's last one: add another one first")
            if leaving := self._instances_of(name):
                scaling_id = self._begin_leaving(name, leaving, timeout_s, are_replaced)
        except BaseException:
            self._launcher.hold_node(name, is_held=False)
            raise
        change = self._new(name, "remove", "leaving", "")
        self._run(change, self._remove(change, scaling_id))
        return change

    def get(self, change_id: str) -> NodeChange | None:
        change = self._changes.get(change_id)
        return self._timed(change) if change is not None else None

    def recent(self) -> list[NodeChange]:
        """All that are kept, the oldest first."""
        return [self._timed(change) for change in self._changes.values()]

    def abort(self, change_id: str) -> NodeChange:
        """Give a change up: a node that joins does not, one that leaves stays.

        Raises:
            MigrationError: It has ended.
        """
        change = self._changes[change_id]
        if not change.is_open or self._task is None:
            raise MigrationError(f"change {change_id} is {change.state}: nothing to abort")
        self._task.cancel()
        return change

    async def wait(self, change_id: str, timeout_s: float | None = None) -> NodeChange:
        """Return when it has ended, or after ``timeout_s``."""
        if self._changes[change_id].is_open and self._task is not None:
            await asyncio.wait({self._task}, timeout=timeout_s)
        return self._timed(self._changes[change_id])

    # ---- checks

    def _check_free(self) -> None:
        if last := next((one for one in self._changes.values() if one.is_open), None):
            raise MigrationError(
                f"node {last.node} is {last.state}: wait for the end of {last.id}, or abort it"
            )

    def _instances_of(self, name: str) -> list[InstanceId]:
        found = next(node for node in self.nodes() if node.name == name)
        return [InstanceId(one) for one in found.instances if one in self._cluster.instances]

    def _begin_leaving(
        self, name: str, leaving: list[InstanceId], timeout_s: float, are_replaced: bool
    ) -> str:
        try:
            return self._scaler.begin_leaving(
                leaving, timeout_s, f"node {name}", are_replaced=are_replaced
            ).id
        except MigrationError as refused:
            raise MigrationError(
                f"node {name} has instances still ({', '.join(leaving)}): {refused}"
            ) from None

    # ---- running

    def _new(self, node: str, action: str, state: str, why: str) -> NodeChange:
        change = NodeChange(f"n{next(self._numbers)}", node, action, state, why=why)
        self._changes[change.id] = change
        for old in list(self._changes)[:-_KEPT]:
            del self._changes[old]
        self._began_s = self._clock.now()
        return change

    def _run(self, change: NodeChange, work: Coroutine[Any, Any, None]) -> None:
        async def run() -> None:
            outcome = "failed"
            try:
                await work
                outcome = "done"
            except asyncio.CancelledError:
                outcome = "aborted"
            except BanaServeError as failed:
                change.reason = str(failed)
            except Exception as broken:
                logger.exception("node %s", change.node)
                change.reason = f"{type(broken).__name__}: {broken}"
            self._timed(change)
            change.state, change.now = outcome, ""
            logger.info("%s node %s: %s %s", change.action, change.node, outcome, change.reason)

        self._task = asyncio.create_task(run())

    def _timed(self, change: NodeChange) -> NodeChange:
        if change.is_open:
            change.seconds = self._clock.now() - self._began_s
        return change

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
            change.now = "giving it back"
            await self._launcher.remove_node(name)
        except BaseException:
            if any(node.name == name for node in self.nodes()):
                self._launcher.hold_node(name, is_held=False)
            raise

    async def _wait_left(self, name: str, scaling_id: str) -> None:
        try:
            scaling = await self._scaler.wait(scaling_id)
        except asyncio.CancelledError:
            with contextlib.suppress(MigrationError):  # it has just ended
                self._scaler.abort(scaling_id)
            await self._scaler.wait(scaling_id)
            raise
        if scaling.state != "done":
            why = scaling.reason or f"scaling {scaling_id} was given up"
            raise MigrationError(f"node {name} has instances still: {why}")

    # ---- machines that the cluster gains

    async def _look(self) -> None:
        while True:
            await self._clock.sleep(LOOK_S)
            try:
                for address in await self._launcher.gained():
                    await self._take(address)
            except Exception:
                logger.exception("nodes that the cluster gains")

    async def _take(self, address: str) -> None:
        while any(one.is_open for one in self._changes.values()) and self._task is not None:
            await asyncio.wait({self._task})
        change = await self.wait(self.begin_add(address, "the cluster has gained it").id)
        if change.state != "done":
            logger.warning(
                "node %s, which the cluster has gained, is not used: %s", address, change.reason
            )
