"""Task that takes one unit through the phases of a move."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass

from banaserve.base.errors import BanaServeError, MigrationError
from banaserve.base.types import InstanceId
from banaserve.contracts.migration_api import MoveStatus
from banaserve.contracts.move_phase import MovePhase
from banaserve.contracts.rpc.typed_rpc import call
from banaserve.migration.worker_api import MigrationApi, MoveReport
from banaserve.serving.monitoring import metrics
from banaserve.serving.moves.guest_pool import GuestHandle, GuestPool
from banaserve.serving.moves.host_state import HostState
from banaserve.serving.moves.move_plan import UnitMove, copies_again, timeout_s
from banaserve.serving.operation_base import OperationAbortedError

_POLL_S = 0.01
_LOOK_S = {"preparing": 0.05, "copying": 0.005, "freeing": 0.02}
"""Seconds between two looks at the host, each of which is a call between two of its steps."""


@dataclass(eq=False)
class MigrationTask:
    """Move of one unit: the host does the work, the task decides when the next phase begins.

    Attributes:
        move: Status of the move, updated as the move goes on.
        target: Instance that the unit moves to; None for home.
        precopy: True to copy KV while the host serves.
        is_aborted: Function that returns whether the move is aborted, called between two looks at
            the host until COMMIT.
        on_commit: Callback once the host goes on with the unit in its new place.
        blocks_gained: Number of blocks that the host's pool has gained; negative if it has shrunk.
    """

    host_state: HostState
    guests: GuestPool
    move: MoveStatus
    planned: UnitMove
    target: InstanceId | None
    precopy: bool
    is_aborted: Callable[[], bool]
    on_commit: Callable[[], None]
    blocks_gained: int = 0

    def __post_init__(self) -> None:
        self._link = self.host_state.link()
        self._num_bytes = self.host_state.num_bytes(self.planned.modules)
        self._guest: GuestHandle | None = None
        self._begun = False

    async def run(self) -> None:
        """Move the unit to its target.

        Raises:
            MigrationError: The unit could not be moved; until COMMIT it is where it was.
            InstanceDeadError: The host has ended.
            OperationAbortedError: The user has aborted the move.
        """
        try:
            await self._make_ready()
            await self._prepare()
            if self.precopy:
                await self._copy()
            await self._commit()
        except Exception:  # no cancellation: then the server stops, and the host ends with it
            await self._give_up()
            raise
        finally:
            if self._guest is not None:
                self._guest.moves.discard(self.move.move_id)
        try:
            await self._settle()
        except MigrationError as failed:
            words = f"{self.planned.modules} have moved all the same: {failed}"
            raise MigrationError(words) from failed

    # ---- before COMMIT

    async def _make_ready(self) -> None:
        if self.target is None:
            async with self._phase("shrinking"):
                await self._shrink()
            return
        async with self._phase("starting"):
            host, target, move_id = self.host_state.instance, self.target, self.move.move_id
            loads_weights = self.planned.modules.loads_weights
            guest = self.guests.free_for(host.id, target, loads_weights=loads_weights)
            if guest is None:
                guest = await self.guests.start(
                    host, target, self._link, move_id, self._check_abort
                )
            guest.moves.add(move_id)
            self._guest = guest

    async def _shrink(self) -> None:
        """Remove the blocks from the pool that will have no memory once the unit is home."""
        host_state, loop = self.host_state, asyncio.get_running_loop()
        unit_id = self.planned.unit_id
        await host_state.refresh()
        rest = [u.modules for u in host_state.units(self.guests) if u.unit_id != unit_id]
        target = host_state.pool_with(rest)
        before = await self._link.pool_blocks()
        limit_s = timeout_s(self.move.phase, self._num_bytes)
        until_s = loop.time() + limit_s
        while busy := await host_state.shrink_pool(target):
            self._check_abort()
            if loop.time() >= until_s:
                raise MigrationError(
                    f"{busy} KV blocks beyond {target} are in use after {limit_s:.0f} s: return "
                    "it when fewer requests run"
                )
            await asyncio.sleep(_POLL_S)
        self.blocks_gained -= max(0, before - target)

    async def _prepare(self) -> None:
        planned, move_id = self.planned, self.move.move_id
        guest_id = self._guest.id if self._guest is not None else None
        async with self._phase("preparing"):
            self._check_abort()
            self._begun = True
            if planned.unit_id:
                asked = call(
                    MigrationApi.banaserve_migration_move_on, move_id, planned.unit_id, guest_id
                )
            else:
                assert guest_id is not None
                asked = call(
                    MigrationApi.banaserve_migration_prepare, move_id, planned.modules, guest_id
                )
            await self._link.ask_workers(asked)
            await self._until(MovePhase.PREPARED)

    async def _copy(self) -> None:
        dirty: int | None = None
        num_times = 0
        async with self._phase("copying"):
            while True:
                asked = call(MigrationApi.banaserve_migration_precopy, self.move.move_id)
                await self._link.ask_workers(asked)
                copied = await self._until(MovePhase.COPIED)
                now = copied.dirty_blocks or 0
                num_times += 1
                if not copies_again(dirty, now, num_times):
                    return
                dirty = now

    async def _commit(self) -> None:
        self._check_abort()
        async with self._phase("committing"):
            limit_s = timeout_s(self.move.phase, self._num_bytes)
            asked = call(MigrationApi.banaserve_migration_commit, self.move.move_id)
            try:
                self._note((await self._link.ask_workers(asked, limit_s)).move)
            except MigrationError:  # the host may have committed all the same
                move = (await self.host_state.refresh()).moves.get(self.move.move_id)
                if move is not None:
                    self._note(move)
                if move is None or move.phase is not MovePhase.COMMITTED:
                    raise
        self.on_commit()

    async def _until(self, phase: MovePhase, may_abort: bool = True) -> MoveReport:
        loop = asyncio.get_running_loop()
        limit_s = timeout_s(self.move.phase, self._num_bytes)
        until_s = loop.time() + limit_s
        while True:
            if may_abort:
                self._check_abort()
            move = (await self.host_state.refresh()).moves[self.move.move_id]
            self._note(move)
            if move.phase is phase:
                return move
            if move.phase in (MovePhase.FAILED, MovePhase.ABORTED):
                raise MigrationError(move.reason or f"the host has {move.phase.value} it")
            if loop.time() >= until_s:
                raise MigrationError(f"{self.move.phase} took more than {limit_s:.0f} s")
            await asyncio.sleep(_LOOK_S[self.move.phase])

    def _check_abort(self) -> None:
        if self.is_aborted():
            raise OperationAbortedError
        self._link.check()
        if self._guest is not None and self.guests.get(self._guest.id) is None:
            raise MigrationError(f"the guest beside {self.target} has ended")

    async def _give_up(self) -> None:
        """Restore the host's state from before the move; nothing to do if the host has ended."""
        with contextlib.suppress(BanaServeError):
            if self._begun:
                asked = call(MigrationApi.banaserve_migration_abort, self.move.move_id)
                await self._link.ask_workers(asked)
        if self.target is None:
            with contextlib.suppress(BanaServeError):
                self.blocks_gained += await self.host_state.grow_pool()

    # ---- after COMMIT

    async def _settle(self) -> None:
        """Free memory and let the pool grow; a failure here leaves the unit at its target."""
        self._register()
        async with self._phase("freeing"):
            asked = call(MigrationApi.banaserve_migration_free, self.move.move_id)
            await self._link.ask_workers(asked)
            await self._until(MovePhase.FREED, may_abort=False)
        async with self._phase("growing"):
            self.blocks_gained += await self.host_state.grow_pool()
        self.move.phase = "done"

    def _register(self) -> None:
        unit_id = self.move.unit_id
        for guest in self.guests:
            guest.units.discard(unit_id)
        if self._guest is not None:
            self._guest.units.add(unit_id)
        if self.target is None:
            self.host_state.since_s.pop(unit_id, None)
        else:
            self.host_state.since_s[unit_id] = asyncio.get_running_loop().time()

    # ---- reporting

    @contextlib.asynccontextmanager
    async def _phase(self, name: str) -> AsyncIterator[None]:
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        self.move.phase = name
        try:
            yield
        finally:
            seconds = loop.time() - began_s
            self.move.seconds[name] = self.move.seconds.get(name, 0.0) + seconds
            metrics.PHASE_S.labels(name).observe(seconds)

    def _note(self, told: MoveReport) -> None:
        self.move.facts = self.move.facts | told.facts.measured()
