"""Places of agents that Ray has started: asked of a process of their own, ``ray_driver``."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from banaserve.errors import UserError
from banaserve.nodes.assignment import InstanceNeed
from banaserve.nodes.places import AgentPlace
from banaserve.types import InstanceId, Role

# Longer than the driver's own, and than Ray's processes wait for a head that is away: to end the
# driver ends all agents.
_PLACE_S = 150.0
_FIND_S = 90.0
_MAX_LINE_BYTES = 1 << 20


class RayRequest(msgspec.Struct, frozen=True):
    """What the process that speaks with Ray is told first.

    Attributes:
        address: Of the Ray cluster; ``auto`` for the one of this machine.
        key: Of ours, for the agents.
        name: Of the server, for Ray's tables.
        instances: Ids and values of roles; empty for an agent on every node that has a CPU.
        need: Of each instance.
        bundles: Resources of each agent, where they were placed before; empty lets it plan them.
    """

    address: str
    key: str
    name: str
    instances: list[tuple[str, str]]
    need: InstanceNeed
    bundles: list[dict[str, float]] = []


class RayAnswer(msgspec.Struct, frozen=True):
    """One line of its output.

    Attributes:
        bundles: With which all agents were placed.
        problem: Why it cannot do what it was asked; empty where it could.
    """

    places: list[AgentPlace] = []
    bundles: list[dict[str, float]] = []
    problem: str = ""


class RayPlaces:
    """Agents that Ray places, one a node, and starts again.

    Ray's driver is a process of its own: it brings a hundred threads and signal handlers. What Ray
    has placed ends with it, and it ends with this process. Where it is lost, as with the cluster's
    head, another one places as many agents anew.

    Args:
        address: Of the Ray cluster, or ``auto``.
        log_path: Gets what Ray prints.
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

    async def open(self, say: Callable[[str], None]) -> list[AgentPlace]:
        say(f"asking Ray ({self._request.address}) for nodes")
        if os.environ.get("RAY_AUTH_MODE") != "token":
            say("Ray lets everybody in who reaches its ports: RAY_AUTH_MODE=token lets it ask")
        async with self._asking:
            return await self._place()

    async def find(self, number: int) -> AgentPlace:
        async with self._asking:
            if self._driver is None:
                return (await self._place())[number]
            return (await self._ask(str(number).encode(), _FIND_S)).places[0]

    async def _place(self) -> list[AgentPlace]:
        """Start a driver and let it place all agents."""
        log = os.open(self._log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        try:
            self._driver = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "banaserve.nodes.ray_driver",
                str(os.getpid()),
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=log,
                limit=_MAX_LINE_BYTES,
                start_new_session=True,
            )
        finally:
            os.close(log)
        try:
            answer = await self._ask(msgspec.json.encode(self._request), _PLACE_S)
        except UserError:
            await self.close()  # it has placed nothing
            raise
        self._request = msgspec.structs.replace(self._request, bundles=answer.bundles)
        return answer.places

    async def _ask(self, line: bytes, timeout_s: float) -> RayAnswer:
        """What the driver answers.

        Raises:
            UserError: Ray cannot do it; a driver that says nothing has ended.
        """
        driver = self._driver
        assert driver is not None
        assert driver.stdin is not None
        assert driver.stdout is not None
        try:
            driver.stdin.write(line + b"\n")
            async with asyncio.timeout(timeout_s):
                said = await driver.stdout.readline()
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
