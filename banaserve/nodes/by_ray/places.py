"""Agents that Ray has started: their places, reported by ``driver``, and their actors."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

import msgspec

from banaserve.base.access.key_files import CLUSTER_KEY_VARIABLE
from banaserve.base.errors import UserError
from banaserve.base.types import InstanceId, Role
from banaserve.nodes.places import AgentPlace, NumberedPlace
from banaserve.nodes.server.assignment import InstanceNeed

logger = logging.getLogger(__name__)
# Longer than the driver's own timeouts, and than Ray's processes wait for a lost head: a timeout
# here ends the driver, and with it all agents.
_PLACE_S = 150.0
_FIND_S = 90.0
_MAX_LINE_BYTES = 1 << 20


class RayRequest(msgspec.Struct, frozen=True):
    """First line of the driver's input.

    Attributes:
        address: Address of the Ray cluster; ``auto`` for the cluster of this machine.
        key: Key of the banaserve cluster, for the agents.
        name: Name of the server, for Ray's tables.
        instances: Ids and role values of instances; empty for an agent on every node with a CPU.
        need: Resources that each instance needs.
        bundles: Resources of each agent placed before, those of nodes that joined later at the end;
            empty lets the driver plan them.
        dropped: Numbers of agents that are no longer needed.
    """

    address: str
    key: str
    name: str
    instances: list[tuple[str, str]]
    need: InstanceNeed
    bundles: list[dict[str, float]] = []
    dropped: list[int] = []


class RayOrder(msgspec.Struct, frozen=True):
    """Each further line of the driver's input.

    Attributes:
        what: ``find`` an agent's place; ``add`` an agent; ``drop`` an agent for good; ``look`` for
            nodes that Ray has gained since the last look.
        number: Number of the agent to find or drop.
        address: Address of Ray's node that gets the added agent.
    """

    what: Literal["find", "add", "drop", "look"]
    number: int = 0
    address: str = ""


class RayAnswer(msgspec.Struct, frozen=True):
    """One line of the driver's output.

    Attributes:
        places: Places of all agents, in the order of their numbers, or of the one agent of the
            order; None for an agent that is no longer needed, or whose node is not there.
        bundles: Resources with which agents were placed; empty if an agent reuses a dropped lease.
        number: Number of the agent that was added.
        gained: Addresses of nodes that Ray has gained.
        problem: Reason why the order failed; empty if it succeeded.
    """

    places: list[AgentPlace | None] = []
    bundles: list[dict[str, float]] = []
    number: int = 0
    gained: list[str] = []
    problem: str = ""


class RayPlaces:
    """Agents that Ray places, one per node, and restarts.

    Ray's driver is a separate process, since it brings a hundred threads and signal handlers. All
    agents end with the driver, and the driver ends with this process. If the driver is lost, as
    with the cluster's head, another driver places as many agents anew.

    Args:
        address: Address of the Ray cluster, or ``auto``.
        log_path: File that receives Ray's output.
    """

    def __init__(
        self,
        address: str,
        key: str,
        name: str,
        instances: Sequence[tuple[InstanceId, Role]],
        need: InstanceNeed,
        log_path: Path,
    ) -> None:
        roles = [(str(instance_id), role.value) for instance_id, role in instances]
        self._request = RayRequest(address, key, name, roles, need)
        self._log_path = log_path
        self._driver: asyncio.subprocess.Process | None = None
        self._asking = asyncio.Lock()
        self._num_unread = 0  # of answers to the orders that the driver has been given
        self._returning: set[asyncio.Task[None]] = set()

    async def open(self, say: Callable[[str], None]) -> list[AgentPlace]:
        say(f"asking Ray ({self._request.address}) for nodes")
        if os.environ.get("RAY_AUTH_MODE") != "token":
            say("Ray lets everybody in who reaches its ports: RAY_AUTH_MODE=token lets it ask")
        async with self._asking:
            return [place for place in await self._place() if place is not None]

    async def find(self, number: int) -> AgentPlace:
        async with self._asking:
            if self._driver is None:
                place = (await self._place())[number]
            else:
                place = (await self._ask(RayOrder("find", number), _FIND_S)).places[0]
        if place is None:
            raise UserError("Ray has not started its agent again: the node is not there")
        return place

    async def add(self, address: str) -> NumberedPlace:
        adding = asyncio.create_task(self._add(address))
        try:
            return await asyncio.shield(adding)
        except asyncio.CancelledError:  # Ray places the agent all the same
            returning = asyncio.create_task(self._give_back(adding))
            self._returning.add(returning)
            returning.add_done_callback(self._returning.discard)
            raise

    async def _give_back(self, adding: asyncio.Task[NumberedPlace]) -> None:
        with contextlib.suppress(UserError):
            await self.drop((await adding).number)

    async def _add(self, address: str) -> NumberedPlace:
        async with self._asking:
            if self._driver is None:
                raise UserError(f"--cluster {self._request.address}: Ray is away at present")
            answer = await self._ask(RayOrder("add", address=address), _PLACE_S)
            (place,) = answer.places
            assert place is not None
            request = self._request
            dropped = [number for number in request.dropped if number != answer.number]
            bundles = [*request.bundles, *answer.bundles]
            self._request = msgspec.structs.replace(request, bundles=bundles, dropped=dropped)
            return NumberedPlace(answer.number, place)

    async def drop(self, number: int) -> None:
        async with self._asking:
            request = self._request
            dropped = [*request.dropped, number]
            self._request = msgspec.structs.replace(request, dropped=dropped)
            if self._driver is not None:
                try:
                    await self._ask(RayOrder("drop", number), _FIND_S)
                except UserError as error:
                    logger.warning("a node that has left: %s", error)

    async def gained(self) -> list[str]:
        async with self._asking:
            if self._driver is None:
                return []
            try:
                return (await self._ask(RayOrder("look"), _FIND_S)).gained
            except UserError as error:
                logger.warning("nodes that Ray gains: %s", error)
                return []

    async def _place(self) -> list[AgentPlace | None]:
        """Start a driver and let it place all agents."""
        log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._driver = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "banaserve.nodes.by_ray.driver",
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=_MAX_LINE_BYTES,
                start_new_session=True,
            )
        finally:
            os.close(log)
        self._num_unread = 0
        try:
            answer = await self._ask(self._request, _PLACE_S)
        except UserError:
            await self.close()  # the driver has placed nothing
            raise
        self._request = msgspec.structs.replace(self._request, bundles=answer.bundles)
        return answer.places

    async def _ask(self, line: RayRequest | RayOrder, timeout_s: float) -> RayAnswer:
        """Send the driver a line, and return its answer.

        Raises:
            UserError: Ray cannot obey, or the driver does not answer and has been ended.
        """
        driver = self._driver
        assert driver is not None
        assert driver.stdin is not None
        assert driver.stdout is not None
        try:
            driver.stdin.write(msgspec.json.encode(line) + b"\n")
            self._num_unread += 1
            async with asyncio.timeout(timeout_s):
                while self._num_unread:  # the answer to an abandoned order comes first
                    said = await driver.stdout.readline()
                    self._num_unread -= 1
        except (TimeoutError, OSError):
            said = b""
        if not said:
            await self.close()
            raise UserError(f"Ray does not answer: see {self._log_path}")
        answer = msgspec.json.decode(said, type=RayAnswer)
        if answer.problem:
            raise UserError(answer.problem)
        return answer

    async def close(self) -> None:
        driver, self._driver = self._driver, None
        if driver is None:
            return
        with contextlib.suppress(ProcessLookupError):
            driver.terminate()
        try:
            async with asyncio.timeout(10.0):
                await driver.wait()
        except TimeoutError:
            driver.kill()
            await driver.wait()


_START_S = 60.0
# Set by Ray for its own tasks; here the server decides the number of threads.
_TAKEN_OUT = ("OMP_NUM_THREADS",)


class AgentActor:
    """Actor that runs ``banaserve node`` as a process beside itself.

    Engines inside an actor would lose its placement group, and would get the environment variables
    that Ray sets for its own tasks.

    Args:
        key: Key of the cluster.
    """

    def __init__(self, key: str) -> None:
        import ray

        self._key = key
        self._host: str = ray.util.get_node_ip_address()
        self._agent: subprocess.Popen[bytes] | None = None
        self._port = 0

    def address(self) -> tuple[str, int]:
        """Return the address of the agent; start an agent if none runs.

        Raises:
            RuntimeError: The agent does not start.
        """
        if self._agent is None or self._agent.poll() is not None:
            self._port = self._start()
        return self._host, self._port

    def _start(self) -> int:
        readable, writable = os.pipe()
        command = [sys.executable, "-m", "banaserve", "node", "--listen", f"{self._host}:0"]
        command += ["--ready-fd", str(writable), "--die-with", str(os.getpid())]
        environment = {n: v for n, v in os.environ.items() if n not in _TAKEN_OUT}
        try:
            self._agent = subprocess.Popen(
                command,
                env={**environment, CLUSTER_KEY_VARIABLE: self._key},
                stdin=subprocess.DEVNULL,
                pass_fds=(writable,),
                start_new_session=True,
            )
        finally:
            os.close(writable)
        with os.fdopen(readable) as said:
            port = said.readline().strip()
        if not port:
            raise RuntimeError(f"banaserve node has ended with {self._agent.wait(_START_S)}")
        return int(port)
