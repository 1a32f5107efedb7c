"""The coordinator's end of one engine: worker methods and the scheduler's pool."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable
from typing import Any, Protocol, TypeVar

from banaserve.engine.vllm.compat import engine as compat
from banaserve.errors import InstanceDeadError, MigrationError, NoAnswerError
from banaserve.types import InstanceId, ModulePlacement, Role

CALL_TIMEOUT_S = 30.0
"""For calls that return at once: they wait for the step under way, which a long prompt fills."""

Reply = dict[str, Any]
T = TypeVar("T")


class HostInstance(Protocol):
    """What the coordinator needs of an ``Instance``."""

    id: InstanceId
    role: Role
    incarnation: int
    pid: int
    llm: Any

    @property
    def is_ready(self) -> bool: ...

    def set_guests(self, num_bytes: int, busy_fraction: float) -> None:
        """What guests beside it take."""
        ...

    def set_placements(self, placements: tuple[ModulePlacement, ...], epoch: int) -> None:
        """What of it runs elsewhere."""
        ...


class HostClient:
    """Calls to one incarnation of an instance; each ends when that incarnation does."""

    def __init__(self, instance: HostInstance) -> None:
        self._instance = instance
        self.incarnation = instance.incarnation
        self._ended: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_alive(self) -> bool:
        instance = self._instance
        return (
            not self._ended.done()
            and instance.is_ready
            and instance.incarnation == self.incarnation
        )

    def end(self) -> None:
        """The engine has ended: calls under way fail."""
        if not self._ended.done():
            self._ended.set_result(None)

    def check(self) -> None:
        """Return if the incarnation still serves.

        Raises:
            InstanceDeadError: It does not.
        """
        if not self.is_alive:
            raise self._dead()

    async def call(self, method: str, *args: Any, timeout_s: float = CALL_TIMEOUT_S) -> Reply:
        """One worker method, named without its prefix.

        Raises:
            MigrationError: The worker refuses.
            NoAnswerError: It does not answer in time.
            InstanceDeadError: The engine has ended.
        """
        name = f"banaserve_migration_{method}"
        made = self._llm().collective_rpc(name, timeout=None, args=args)
        replies: list[Reply] = await self._within(made, timeout_s, method)
        reply = replies[0]
        if reply["error"]:
            raise MigrationError(reply["error"])
        return reply

    async def status(self, memory: bool = False) -> Reply:
        """See ``worker_methods``.

        Args:
            memory: Count what backs the KV cache too, which takes milliseconds between two steps.

        Raises:
            MigrationError: The instance cannot migrate.
            NoAnswerError: It does not answer in time.
            InstanceDeadError: The engine has ended.
        """
        reply = await self.call("status", memory)
        if reply["migration_blocker"]:
            raise MigrationError(reply["migration_blocker"])
        return reply

    async def pool_info(self) -> Reply:
        """Counts of the scheduler's pool."""
        return await self._utility("banaserve_pool_info")

    async def resize_pool(self, num_blocks: int) -> Reply:
        """``busy`` above 0: blocks in use are in the way; they are taken out of circulation.

        They come back with the next call.
        """
        return await self._utility("banaserve_resize_pool", num_blocks, True)

    async def _utility(self, name: str, *args: Any) -> Reply:
        made = compat.call_utility(self._llm(), name, *args)
        reply: Reply = await self._within(made, CALL_TIMEOUT_S, name)
        return reply

    def _llm(self) -> Any:
        self.check()
        return self._instance.llm

    def _dead(self) -> InstanceDeadError:
        return InstanceDeadError(f"instance {self._instance.id} has ended")

    async def _within(self, made: Awaitable[T], timeout_s: float, what: str) -> T:
        call = asyncio.ensure_future(made)
        either: set[asyncio.Future[Any]] = {call, self._ended}
        try:
            await asyncio.wait(either, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if call.done():
                return call.result()
        except compat.EngineDeadError:
            raise self._dead() from None
        finally:
            call.cancel()
        if self._ended.done():
            raise self._dead()
        raise NoAnswerError(
            f"instance {self._instance.id} has not answered {what} in {timeout_s:.0f} s"
        )
