"""Client of one engine for the coordinator: calls to its workers and to its scheduler."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from typing import Any, TypeVar

from banaserve.base.errors import InstanceDeadError, MigrationError, NoAnswerError, ProtocolError
from banaserve.base.net.loop_watch import wait_first
from banaserve.contracts.rpc.engine_api import CoreApi, PoolResize
from banaserve.contracts.rpc.typed_rpc import RemoteCall, call
from banaserve.engine.compat import engine as compat
from banaserve.serving.instances.instance import Instance
from banaserve.serving.moves import rank_reports

CALL_TIMEOUT_S = 30.0
"""Timeout of calls that return at once, in seconds: they wait for the step under way, which may
hold a long prompt."""

T = TypeVar("T")


class HostClient:
    """Calls to one incarnation of an instance; each ends when that incarnation does.

    Every call raises:
        MigrationError: The engine refuses, or its reply breaks the contract.
        NoAnswerError: The engine does not answer in time.
        InstanceDeadError: The incarnation has ended.
    """

    def __init__(self, instance: Instance) -> None:
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
        """Mark the engine as ended: calls under way fail."""
        if not self._ended.done():
            self._ended.set_result(None)

    def check(self) -> None:
        """Raise InstanceDeadError if the incarnation does not serve any more."""
        if not self.is_alive:
            raise self._dead()

    async def ask_workers(self, asked: RemoteCall[T], timeout_s: float | None = None) -> T:
        """Call a method of ``MigrationApi`` on all workers; return one reply for all of them."""
        made = self._llm().collective_rpc(asked.name, timeout=None, args=asked.args)
        what = asked.name.removeprefix("banaserve_migration_")
        replies: list[object] = await self._within(made, timeout_s or CALL_TIMEOUT_S, what)
        return rank_reports.together(self._read_all(asked, replies))

    async def pool_blocks(self) -> int:
        """Return the present number of blocks of the scheduler's pool."""
        return (await self._ask_core(call(CoreApi.banaserve_pool_info))).num_blocks

    async def resize_pool(self, num_blocks: int) -> PoolResize:
        """Resize the pool; while blocks in use prevent this, blocks to remove are not allocated."""
        return await self._ask_core(call(CoreApi.banaserve_resize_pool, num_blocks, True))

    async def _ask_core(self, asked: RemoteCall[T]) -> T:
        made = compat.call_utility(self._llm(), asked.name, *asked.args)
        reply: object = await self._within(made, CALL_TIMEOUT_S, asked.name)
        return self._read(asked, reply)

    def _read_all(self, asked: RemoteCall[T], replies: Sequence[object]) -> list[T]:
        """Return the replies of all ranks; raise MigrationError if one refuses."""
        told, refusals = [], []
        for reply in replies:
            try:
                told.append(self._read(asked, reply))
            except MigrationError as refused:
                refusals.append(str(refused))
        if refusals:
            raise MigrationError(rank_reports.reason_of(refusals))
        return told

    def _read(self, asked: RemoteCall[T], reply: object) -> T:
        try:
            return asked.read(reply)
        except ProtocolError as wrong:
            raise MigrationError(f"instance {self._instance.id}: {wrong}") from wrong

    def _llm(self) -> Any:
        self.check()
        return self._instance.llm

    def _dead(self) -> InstanceDeadError:
        return InstanceDeadError(f"instance {self._instance.id} has ended")

    async def _within(self, made: Awaitable[T], timeout_s: float, what: str) -> T:
        call = asyncio.ensure_future(made)
        either: set[asyncio.Future[Any]] = {call, self._ended}
        try:
            await wait_first(either, timeout_s)
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
