"""Coordinator of migrations: takes requests, refuses the impossible ones, and runs the rest."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections import deque
from collections.abc import Callable, Coroutine, Mapping, Sequence
from functools import partial
from typing import Any

from banaserve.base.clock import WallClock
from banaserve.base.errors import BanaServeError, MigrationError
from banaserve.base.text.names import check_known
from banaserve.base.types import InstanceId
from banaserve.contracts.migration_api import (
    ExpertLoad,
    ExpertLoadRequest,
    Migration,
    MigrationRequest,
    MoveStatus,
    Overlapping,
    OverlapRequest,
    Return,
)
from banaserve.contracts.rpc.typed_rpc import call
from banaserve.contracts.trace_events import MoveCommitted
from banaserve.migration.units.registry import unit_asked
from banaserve.migration.worker_api import MigrationApi
from banaserve.serving.instances.instance import Instance
from banaserve.serving.monitoring import metrics
from banaserve.serving.moves.guest_pool import GuestPool
from banaserve.serving.moves.host_client import HostClient
from banaserve.serving.moves.host_state import HostState
from banaserve.serving.moves.move_plan import UnitMove, plan_move, plan_return
from banaserve.serving.moves.sizes import ModelFacts, check_room
from banaserve.serving.moves.task import MigrationTask
from banaserve.serving.operation_base import Operations

logger = logging.getLogger(__name__)

_KEPT = 200
_POLL_S = 0.02
_GUESTS_END_S = 10.0


class Coordinator(Operations[Migration]):
    """Coordinator of migrations: one at a time for each host, concurrent for different hosts.

    A guest is a process of its own beside its target, so a target engine that dies takes no guest
    with it; a host that dies ends its guests.

    Args:
        available: Function that returns the memory for guests beside an instance, in bytes.

    Attributes:
        hosts: State of each instance as a host, by the instance's id.
        leaving: Instances that are being removed: nothing is moved from or to them.
        committed: Last committed moves, each with the time at which its host went on, on the
            machine's monotonic clock: for traces of requests that ran there.
    """

    def __init__(
        self,
        instances: Mapping[InstanceId, Instance],
        guests: GuestPool,
        facts: ModelFacts,
        available: Callable[[str], int],
    ) -> None:
        super().__init__("migration", "m", WallClock(), _KEPT)
        self.hosts = {name: HostState(instance, facts) for name, instance in instances.items()}
        self.leaving: set[InstanceId] = set()
        self.guests = guests
        self.facts = facts
        self._available = available
        self.committed: deque[tuple[float, MoveCommitted]] = deque(maxlen=_KEPT)

    # ---- requests

    async def begin(self, ask: MigrationRequest) -> Migration:
        """Check a request and begin the migration.

        Raises:
            MigrationError: The request cannot be carried out; nothing has moved.
            InstanceDeadError: The host has just ended.
            UserError: The request names an unknown instance.
        """
        host_state = self._host_state(ask.source)
        async with host_state.planning:
            await host_state.refresh()
            # No wait from here on: a pause, or the removal of an instance, ends moves under way.
            if not isinstance(ask, Return):
                self._check_stays(ask.source)
            target = None if isinstance(ask, Return) else self._target(ask.source, ask.target)
            host_state.instance.check_not_paused()
            link = host_state.link()
            plan = self._plan(ask, host_state)
            taken = self._check_room(plan, target, host_state) if target is not None else 0
            migration = self._make(ask, plan, target, taken)
            host_state.moving[migration.id] = [planned.modules for planned in plan]
        work = self._migrate(migration, plan, target, host_state, link, ask.copies_ahead)
        self._carry_out(migration, work)
        await asyncio.sleep(0)  # a task that is cancelled before its first step runs no handler
        return migration

    def _abort(self, state: Migration) -> None:
        """Abort a migration; its committed moves stay where they are."""
        if state.state == "waiting":
            self._cancel(state)

    async def end_moves(self, reason: str, instance_id: InstanceId | None = None) -> None:
        """Abort all migrations, or those from and to an instance; return when they have ended."""
        under_way = [
            migration
            for migration in self.recent()
            if migration.is_open and instance_id in (None, migration.host, migration.to)
        ]
        for migration in under_way:
            self.abort(migration.id, reason)
        for migration in under_way:
            await self.wait(migration.id)

    async def stop(self) -> None:
        """Abort all migrations and end all guests without moving their units home."""
        await super().stop()
        await self.guests.stop()

    async def overlap(self, ask: OverlapRequest) -> Overlapping:
        """Let an instance and its guests compute concurrently or in turn, until it restarts.

        Raises:
            UserError: There is no such instance.
            MigrationError: The instance does not serve, or cannot migrate or cut its steps so.
        """
        host_state = self._host_state(ask.instance)
        asked = call(MigrationApi.banaserve_migration_overlap, ask.max_microbatches)
        overlap = await host_state.link().ask_workers(asked)
        await host_state.refresh()
        return overlap

    async def expert_load(self, ask: ExpertLoadRequest) -> ExpertLoad:
        """Return how often an instance's routers have chosen each expert since counting began.

        Raises:
            UserError: There is no such instance.
            MigrationError: The instance does not serve or cannot migrate; its model has no experts.
        """
        if not self.facts.num_experts:
            raise MigrationError("this model has no experts")
        asked = call(MigrationApi.banaserve_migration_experts, ask.counting)
        chosen = await self._host_state(ask.instance).link().ask_workers(asked)
        return ExpertLoad(ask.instance, chosen)

    # ---- instances that come and go

    def instance_ended(self, instance_id: InstanceId) -> None:
        """Handle the end of an engine: kill its guests, and so end all its units."""
        self.hosts[instance_id].ended()
        metrics.UNITS_AWAY.labels(instance_id).set(0)
        for guest in self.guests:
            if guest.host == instance_id:
                guest.kill()

    def adopt(self, instance: Instance) -> None:
        """Add an instance that modules can move from and to."""
        self.hosts[instance.id] = HostState(instance, self.facts)

    async def vacate(self, instance_id: InstanceId) -> None:
        """Bring home all units that run beside an instance that is being removed.

        The units that the instance itself has away end with it.

        Raises:
            MigrationError: A unit of another instance cannot return home.
        """
        self.leaving.add(instance_id)
        await self.end_moves(f"instance {instance_id} is being removed", instance_id)
        for host_state in list(self.hosts.values()):
            for unit in host_state.units(self.guests):
                still_away = {one.unit_id for one in host_state.units(self.guests)}
                is_away = unit.at == instance_id and unit.unit_id in still_away
                if not is_away or not host_state.instance.is_ready:
                    continue
                migration = await self.begin(unit.modules.return_request(host_state.id))
                await self.wait(migration.id)
                if migration.state != "done":
                    raise MigrationError(
                        f"{unit.modules} of {host_state.id} cannot come home from {unit.at}: "
                        f"{migration.error or migration.state}"
                    )

    def stays(self, instance_id: InstanceId) -> None:
        """Cancel the removal of an instance: modules may move from and to it again."""
        self.leaving.discard(instance_id)

    async def forget(self, instance_id: InstanceId) -> None:
        """Forget an instance whose engine has ended; return when no guest of or beside it is left.

        An idle guest beside the instance is detached by its host within seconds, and then ends by
        itself.
        """
        loop = asyncio.get_running_loop()
        until_s = loop.time() + _GUESTS_END_S
        while theirs := [g for g in self.guests if instance_id in (g.host, g.target)]:
            for guest in theirs:
                if guest.host == instance_id or loop.time() >= until_s:
                    guest.kill()
            await asyncio.sleep(_POLL_S)
        del self.hosts[instance_id]
        self.leaving.discard(instance_id)
        self.guests.forget_bound(instance_id)

    # ---- checks

    def _host_state(self, name: str) -> HostState:
        check_known("instance", name, self.hosts)
        host_state = self.hosts[InstanceId(name)]
        if not host_state.instance.is_ready:
            raise MigrationError(f"instance {name} does not serve at present")
        if host_state.instance.service.is_replaced:
            raise MigrationError(f"instance {name} is being restarted")
        return host_state

    def _target(self, source: str, name: str) -> InstanceId:
        if source == name:
            raise MigrationError(f"from {source} to {name}: they are the same instance")
        self._check_stays(name)
        return InstanceId(self._host_state(name).id)

    def _check_stays(self, name: str) -> None:
        if name in self.leaving:
            raise MigrationError(f"instance {name} is being removed")

    def _plan(self, ask: MigrationRequest, host_state: HostState) -> Sequence[UnitMove]:
        away, wanted = host_state.units(self.guests), unit_asked(ask)
        if isinstance(ask, Return):
            return plan_return(wanted, self.facts.shape, away, host_state.moving)
        assert wanted is not None
        return plan_move(wanted, ask.target, self.facts.shape, away, host_state.moving)

    def _check_room(
        self, plan: Sequence[UnitMove], target: InstanceId, host_state: HostState
    ) -> int:
        kv, num_ranks, taken = host_state.kv, host_state.instance.num_ranks, 0
        # Moves under way may not have taken theirs yet.
        promised = sum(one.predicted_bytes for one in self.recent() if one.is_open)
        for planned in plan:
            left = self._available(target) - promised - taken
            taken += check_room(planned.modules, target, self.facts, kv, left, num_ranks)
        return taken

    def _make(
        self,
        ask: MigrationRequest,
        plan: Sequence[UnitMove],
        target: InstanceId | None,
        taken: int,
    ) -> Migration:
        migration_id = self._new_id()
        kind = "return" if isinstance(ask, Return) else plan[0].modules.kind
        moves = []
        for number, planned in enumerate(plan):
            move_id = f"{migration_id}.{number}"
            unit_id = planned.unit_id or move_id
            moves.append(MoveStatus(move_id, unit_id, str(planned.modules), target))
        return Migration(
            migration_id, kind, ask.source, target, "waiting", moves, predicted_bytes=taken
        )

    # ---- running

    async def _migrate(
        self,
        migration: Migration,
        plan: Sequence[UnitMove],
        target: InstanceId | None,
        host_state: HostState,
        link: HostClient,
        precopy: bool,
    ) -> None:
        try:
            async with host_state.turn:
                migration.state = "running"
                for planned, move in zip(plan, migration.moves, strict=True):
                    link.check()  # the plan holds only for the incarnation that it was made from
                    task = MigrationTask(
                        host_state,
                        self.guests,
                        move,
                        planned,
                        target,
                        precopy,
                        is_aborted=lambda: self._is_aborting(migration),
                        on_commit=partial(self._note_commit, migration, move),
                    )
                    try:
                        await task.run()
                    finally:
                        migration.blocks_gained += task.blocks_gained
                    _count(migration.kind, move)
                    has_kv = planned.modules.kv_pages(self.facts.num_kv_heads) > 0
                    if has_kv and target is not None and not task.blocks_gained:
                        note = f"{move.modules}: frees bytes, but no block of the pool"
                        migration.notes.append(note)
        finally:
            host_state.moving.pop(migration.id, None)

    def _note_commit(self, migration: Migration, move: MoveStatus) -> None:
        stall_s = float(move.facts.get("stall_s", 0.0))
        moved = MoveCommitted(migration.host, move.move_id, move.modules, migration.to, stall_s)
        self.committed.append((self._clock.now(), moved))

    def _end(self, state: Migration, ending: str, reason: str) -> None:
        super()._end(state, ending, reason)
        metrics.MIGRATIONS.labels(state.kind, ending).inc()

    async def _run(self, state: Migration, work: Coroutine[Any, Any, None]) -> None:
        host_state = self.hosts[InstanceId(state.host)]
        await super()._run(state, work)
        with contextlib.suppress(BanaServeError):
            await host_state.refresh()  # its pool and placements have changed


def _count(kind: str, move: MoveStatus) -> None:
    facts = move.facts
    metrics.BYTES.labels(kind, "precopy").inc(facts.get("precopy_bytes", 0))
    metrics.BYTES.labels(kind, "commit").inc(facts.get("commit_bytes", 0))
    metrics.BYTES.labels(kind, "weights").inc(facts.get("weight_bytes", 0))
    metrics.STALL_S.labels(kind).observe(facts.get("stall_s", 0.0))
