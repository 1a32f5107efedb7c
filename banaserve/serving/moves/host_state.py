"""State that the coordinator keeps of one instance as a host."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

from banaserve.contracts.rpc.typed_rpc import call
from banaserve.migration.kv.host_kv import blocks_gained
from banaserve.migration.units.base import MigrationUnit
from banaserve.migration.worker_api import HostStatus, KvStatus, MigrationApi
from banaserve.serving.instances.instance import Instance
from banaserve.serving.moves.guest_pool import GuestPool
from banaserve.serving.moves.host_client import HostClient
from banaserve.serving.moves.move_plan import RemoteUnit
from banaserve.serving.moves.process_stats import CoreWaits
from banaserve.serving.moves.sizes import ModelFacts


class HostState:
    """State of one instance: its present incarnation, and its modules that are away or moving.

    Attributes:
        turn: Lock held by the running migration of this host.
        planning: Lock held while a request is checked against the modules away or moving.
        moving: Modules of migrations that have not ended, by the migrations' ids.
        status: Last status that the host reported; None before the first.
        since_s: Time at which each unit arrived at its present place, by unit id, on the event
            loop's clock.
        slow_down: Recent run time of the instance's threads relative to an idle device; None if
            they have hardly run.
        grown_blocks: Number of blocks that migration has added to the pool since the start.
    """

    def __init__(self, instance: Instance, facts: ModelFacts) -> None:
        self.instance = instance
        self.turn = asyncio.Lock()
        self.planning = asyncio.Lock()
        self.moving: dict[str, list[MigrationUnit]] = {}
        self.status: HostStatus | None = None
        self.since_s: dict[str, float] = {}
        self.core_waits = CoreWaits()
        self.slow_down: float | None = None
        self.grown_blocks = 0
        self._facts = facts
        self._link: HostClient | None = None

    @property
    def id(self) -> str:
        return self.instance.id

    def link(self) -> HostClient:
        """Return the client of the present incarnation."""
        if self._link is None or not self._link.is_alive:
            self._link = HostClient(self.instance)
        return self._link

    def ended(self) -> None:
        """Reset the state after the end of the engine, which ends all its units too."""
        if self._link is not None:
            self._link.end()
            self._link = None
        self.status = None
        self.grown_blocks = 0
        self.since_s.clear()

    @property
    def max_microbatches(self) -> int:
        """Maximum micro-batches of a step, as last reported; 1: the host waits for its guests."""
        if self.status is None or self.status.overlap.blocker:
            return 1
        return self.status.overlap.max_microbatches

    async def refresh(self, memory: bool = False) -> HostStatus:
        """Ask the host for its status.

        Raises:
            MigrationError: The instance cannot migrate.
            InstanceDeadError: The instance has ended.
        """
        asked = call(MigrationApi.banaserve_migration_status, memory)
        self.status = await self.link().ask_workers(asked)
        return self.status

    @property
    def kv(self) -> KvStatus:
        assert self.status is not None
        return self.status.kv

    def num_bytes(self, modules: MigrationUnit, num_older_blocks: int | None = None) -> int:
        """Return the bytes of weights and KV that modules of this instance take elsewhere.

        Args:
            num_older_blocks: Number of KV blocks that have moved; None for all that may.
        """
        if num_older_blocks is not None:
            return num_older_blocks * len(modules.layers) * self.kv.page_bytes
        return self._facts.num_bytes(modules, self.kv)

    def units(self, guests: GuestPool) -> list[RemoteUnit]:
        """Return the units that are away; the place of an unknown guest's unit is ``?``."""
        if self.status is None:
            return []
        found = []
        for one in self.status.units:
            guest = guests.get(one.guest_id)
            at = guest.target if guest is not None else "?"
            of_unit = (one.guest_id, one.epoch, one.num_older_blocks)
            found.append(RemoteUnit(one.unit_id, one.modules, at, *of_unit))
        return found

    def pool_with(self, away: Sequence[MigrationUnit]) -> int:
        """Return the number of blocks that the pool may have while these modules are away."""
        kv = self.kv
        pages = sum(modules.num_pages(self._facts.num_kv_heads) for modules in away)
        away_bytes = round(pages * kv.page_bytes)
        kept_bytes = kv.num_layers * kv.page_bytes - away_bytes
        return kv.num_blocks + blocks_gained(kv.num_blocks, kv.max_blocks, away_bytes, kept_bytes)

    async def grow_pool(self) -> int:
        """Let the pool grow to the memory that is free; return the number of blocks added."""
        link = self.link()
        kv = (await self.refresh()).kv
        allowed = kv.num_blocks + kv.blocks_gained
        now = await link.pool_blocks()
        num_blocks = max(now, allowed)  # a pool that could not shrink yet is larger than allowed
        await link.resize_pool(num_blocks)  # also releases blocks that were held back
        link.check()
        self.grown_blocks = num_blocks - kv.num_blocks
        return max(0, allowed - now)

    async def shrink_pool(self, num_blocks: int) -> int:
        """Try to shrink the pool; return the number of blocks in use that prevent this."""
        link, num_at_start = self.link(), self.kv.num_blocks
        busy = 0
        if await link.pool_blocks() > num_blocks:
            busy = (await link.resize_pool(num_blocks)).busy
        link.check()
        if not busy:
            self.grown_blocks = num_blocks - num_at_start
        return busy
