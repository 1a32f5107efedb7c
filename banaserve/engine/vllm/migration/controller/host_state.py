"""State that the coordinator keeps of one instance as a host."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from banaserve.engine.vllm.migration.controller.guest_pool import GuestPool
from banaserve.engine.vllm.migration.controller.host_client import HostClient, HostInstance
from banaserve.engine.vllm.migration.controller.planner import (
    ModelFacts,
    RemoteUnit,
)
from banaserve.engine.vllm.migration.controller.process_stats import CoreWaits
from banaserve.engine.vllm.migration.kv.host_kv import blocks_gained
from banaserve.engine.vllm.migration.units.base import MigrationUnit
from banaserve.engine.vllm.migration.worker_api import HostStatus, KvStatus


class HostState:
    """One instance: its present incarnation, what of it is away, and what is on its way.

    Attributes:
        turn: Held by the migration of this host that runs.
        planning: Held while a request is checked against what is away and on its way.
        moving: Modules of migrations that have not ended, by their ids.
        status: What the host last said; None before it has.
        since_s: When each unit came to where it is, on the event loop's clock.
        changed_s: When a unit last moved; None where none has.
        slow_down: How many times as long as on an idle device its threads have lately taken; None
            where they have hardly run.
        grown_blocks: By how much the pool is larger than at the start, as far as it was us.
    """

    def __init__(self, instance: HostInstance, facts: ModelFacts) -> None:
        self.instance = instance
        self.turn = asyncio.Lock()
        self.planning = asyncio.Lock()
        self.moving: dict[str, list[MigrationUnit]] = {}
        self.status: HostStatus | None = None
        self.since_s: dict[str, float] = {}
        self.changed_s: float | None = None
        self.core_waits = CoreWaits()
        self.slow_down: float | None = None
        self.grown_blocks = 0
        self._facts = facts
        self._link: HostClient | None = None

    @property
    def id(self) -> str:
        return self.instance.id

    def link(self) -> HostClient:
        """To the present incarnation."""
        if self._link is None or not self._link.is_alive:
            self._link = HostClient(self.instance)
        return self._link

    def ended(self) -> None:
        """The engine has ended, and everything it had away with it."""
        if self._link is not None:
            self._link.end()
            self._link = None
        self.status = None
        self.grown_blocks = 0
        self.since_s.clear()

    @property
    def max_microbatches(self) -> int:
        """That its steps are cut into, as it last said; 1: it waits for its guests."""
        if self.status is None or self.status.overlap.blocker:
            return 1
        return self.status.overlap.max_microbatches

    async def refresh(self, memory: bool = False) -> HostStatus:
        """Ask the host what is where.

        Raises:
            MigrationError: The instance cannot migrate.
            InstanceDeadError: It has ended.
        """
        self.status = await self.link().status(memory)
        return self.status

    @property
    def kv(self) -> KvStatus:
        assert self.status is not None
        return self.status.kv

    def units(self, guests: GuestPool) -> list[RemoteUnit]:
        """What is away; a guest that is not known any more is beside nobody."""
        if self.status is None:
            return []
        found = []
        for unit in self.status.units:
            guest = guests.get(unit.guest_id)
            at = guest.target if guest is not None else "?"
            found.append(RemoteUnit(unit.unit_id, unit.modules, at))
        return found

    # ---- the scheduler's pool

    def pool_with(self, away: Sequence[MigrationUnit]) -> int:
        """Blocks that the pool may have while these modules are away."""
        kv = self.kv
        pages = sum(modules.num_pages(self._facts.num_kv_heads) for modules in away)
        away_bytes = round(pages * kv.page_bytes)
        kept_bytes = kv.num_layers * kv.page_bytes - away_bytes
        return kv.num_blocks + blocks_gained(kv.num_blocks, kv.max_blocks, away_bytes, kept_bytes)

    async def grow_pool(self) -> int:
        """Let the pool grow to what is free; returns by how many blocks it has."""
        link = self.link()
        kv = (await self.refresh()).kv
        allowed = kv.num_blocks + kv.blocks_gained
        now = (await link.pool_info()).num_blocks
        await link.resize_pool(max(now, allowed))  # also lets go of blocks that were held
        link.check()
        self.grown_blocks = kv.blocks_gained
        return max(0, allowed - now)

    async def shrink_pool(self, num_blocks: int) -> int:
        """Try to shrink the pool; returns how many blocks in use are in the way."""
        link, num_at_start = self.link(), self.kv.num_blocks
        busy = 0
        if (await link.pool_info()).num_blocks > num_blocks:
            busy = (await link.resize_pool(num_blocks)).busy
        link.check()
        if not busy:
            self.grown_blocks = num_blocks - num_at_start
        return busy
