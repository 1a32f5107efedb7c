"""Monitor of guests: notices guests that end or stand still, and counts their resource use.

``live_migration`` puts the parts of live migration together for one run of the server.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator

from banaserve.base.errors import BanaServeError, MigrationError
from banaserve.base.platform.linux import available_memory_bytes
from banaserve.base.platform.run_dir import RunDir
from banaserve.base.tasks import end_tasks
from banaserve.base.types import InstanceId, ModulePlacement
from banaserve.contracts.rpc.typed_rpc import call
from banaserve.engine.compat.config import VllmConfig
from banaserve.migration.worker_api import LinkState, MigrationApi
from banaserve.serving.instances.cluster import Cluster
from banaserve.serving.launch.launcher import Launcher
from banaserve.serving.monitoring import metrics
from banaserve.serving.moves import placement, process_stats
from banaserve.serving.moves.coordinator import Coordinator
from banaserve.serving.moves.guest_pool import GuestPool
from banaserve.serving.moves.host_state import HostState
from banaserve.serving.moves.sizes import model_facts

logger = logging.getLogger(__name__)

LOOK_S = 0.25
_USAGE_EVERY = 4
"""Number of looks from one measurement of the guests' resource use to the next."""
_LONE_USAGE_EVERY = 20
"""The same number for an instance without guests: measuring it reads one file per thread."""
_STOPPED_LOOKS = 2
_END_S = 3.0
IDLE_S = 2.0
"""Time an idle guest is kept, in seconds: the next move of a series finds it ready."""


class GuestMonitor:
    """Background task beside a coordinator that watches hosts and guests until stopped."""

    def __init__(self, coordinator: Coordinator, idle_s: float = IDLE_S) -> None:
        self._coordinator = coordinator
        self._guests = coordinator.guests
        self._idle_s = idle_s
        self._counted: dict[str, tuple[int, int, int]] = {}
        self._shared: set[InstanceId] = set()
        self._task: asyncio.Task[None] | None = None
        self._looks: dict[InstanceId, asyncio.Task[None]] = {}

    def start(self) -> None:
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        await end_tasks(self._task, *self._looks.values())

    async def _run(self) -> None:
        looks = 0
        while True:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(LOOK_S):
                    # A host notices a closed connection when it is asked.
                    await self._guests.has_lost_one.wait()
            self._guests.has_lost_one.clear()
            try:
                await self._look(looks)
            except Exception:
                logger.exception("looking after guests")
            looks += 1

    async def _look(self, number: int) -> None:
        self._looks = {name: look for name, look in self._looks.items() if not look.done()}
        for name, host_state in self._coordinator.hosts.items():
            if name not in self._looks:
                self._looks[name] = asyncio.create_task(self._look_at(host_state))
        if self._looks:  # a host that hangs delays neither other looks nor the end of its guest
            await asyncio.wait(self._looks.values(), timeout=LOOK_S)
        self._end_stopped_guests()
        if number % _USAGE_EVERY == 0:
            await self._count_usage(counts_lone=number % _LONE_USAGE_EVERY == 0)

    async def _look_at(self, host_state: HostState) -> None:
        if not host_state.instance.is_ready or not self._concerns(host_state):
            return
        try:
            await host_state.refresh()
            self._take_over(host_state)
            await self._end_lost_guests(host_state)
            await self._fit_pool(host_state)
            await self._detach_idle(host_state)
            await placement.settle(self._guests, {host_state.instance.id: host_state})
        except BanaServeError:
            pass
        except Exception:
            logger.exception("looking after the guests of %s", host_state.id)

    def _concerns(self, host_state: HostState) -> bool:
        """Return whether the host has or had a guest, has units away, or has a grown pool."""
        status = host_state.status
        knows_any = status is not None and (status.units or status.guests)
        has_guest = any(guest.host == host_state.id for guest in self._guests)
        return bool(knows_any) or has_guest or host_state.grown_blocks > 0

    def _take_over(self, host_state: HostState) -> None:
        """Take over the host's own report of its units: it is authoritative."""
        status, name = host_state.status, host_state.id
        assert status is not None
        at = {unit.unit_id: unit.guest_id for unit in status.units}
        for guest in self._guests:
            if guest.host == name:
                guest.units = {unit for unit, where in at.items() if where == guest.id}
        host_state.instance.set_placements(self._placements(host_state), status.epoch)
        metrics.UNITS_AWAY.labels(name).set(len(status.units))
        metrics.EPOCH.labels(name).set(status.epoch)
        incarnation = host_state.link().incarnation
        known, lost, steps = self._counted.get(name, (incarnation, 0, 0))
        if known != incarnation:
            lost = steps = 0
        metrics.GUESTS_LOST.labels(name).inc(max(0, status.guests_lost - lost))
        metrics.STEPS_LOST.labels(name).inc(max(0, status.steps_lost - steps))
        self._counted[name] = incarnation, status.guests_lost, status.steps_lost

    def _placements(self, host_state: HostState) -> tuple[ModulePlacement, ...]:
        return tuple(
            ModulePlacement(
                part,
                host=InstanceId(host_state.id),
                guest=InstanceId(unit.at),
                epoch=unit.epoch,
                since_s=host_state.since_s.get(unit.unit_id, 0.0),
                guest_bytes=host_state.num_bytes(unit.modules) // len(unit.modules.as_modules()),
            )
            for unit in host_state.units(self._guests)
            for part in unit.modules.as_modules()
        )

    async def _end_lost_guests(self, host_state: HostState) -> None:
        """Kill guests that their host has given up: such a guest may still run, stalled."""
        assert host_state.status is not None
        for guest_id, known in host_state.status.guests.items():
            if known.state is not LinkState.LOST:
                continue
            if (guest := self._guests.get(guest_id)) is not None:
                guest.detached_s = asyncio.get_running_loop().time()
                guest.kill()
            with contextlib.suppress(BanaServeError):
                await _detach(host_state, guest_id)

    async def _fit_pool(self, host_state: HostState) -> None:
        """Shrink a pool that is larger than its memory after a loss, as soon as possible."""
        if host_state.status is None:
            return  # the engine has ended in the meantime
        kv = host_state.kv
        if host_state.grown_blocks > kv.blocks_gained and not host_state.turn.locked():
            await host_state.shrink_pool(kv.num_blocks + kv.blocks_gained)

    async def _detach_idle(self, host_state: HostState) -> None:
        now_s = asyncio.get_running_loop().time()
        for guest in self._guests:
            if guest.host != host_state.id:
                continue
            if guest.detached_s is not None:
                if now_s - guest.detached_s > _END_S:
                    guest.kill()
            elif not guest.is_idle:
                guest.idle_since_s = None
            elif guest.idle_since_s is None:
                guest.idle_since_s = now_s
            elif now_s - guest.idle_since_s >= self._idle_s:
                guest.detached_s = now_s
                try:
                    await _detach(host_state, guest.id)
                except MigrationError:
                    guest.detached_s = None
                    raise

    def _end_stopped_guests(self) -> None:
        """Kill guests that a signal has stopped: they block their host, their KV is lost anyway."""
        for guest in self._guests:
            is_stopped = any(process_stats.is_stopped(pid) for pid in guest.pids)
            guest.stopped = guest.stopped + 1 if is_stopped else 0
            if guest.stopped >= _STOPPED_LOOKS:
                logger.warning("guest %s has been stopped: it is ended", guest.id)
                guest.kill()

    async def _count_usage(self, *, counts_lone: bool) -> None:
        for guest in self._guests:
            for pid in guest.pids:
                last = guest.usages.get(pid, process_stats.ProcessUsage())
                usage = await asyncio.to_thread(process_stats.look, pid, last)
                if usage is not None:
                    guest.usages[pid] = usage
        for name, host_state in self._coordinator.hosts.items():
            here = self._guests.beside(name)
            if not (here or counts_lone or name in self._shared):
                continue
            host_state.slow_down = host_state.core_waits.slow_down(host_state.instance.pid)
            placement.count(placement.sharing_of(self._coordinator, host_state))
            num_bytes = sum(guest.num_bytes for guest in here)
            busy = sum(guest.busy_fraction for guest in here)
            metrics.GUESTS.labels(name).set(len(here))
            metrics.GUEST_BYTES.labels(name).set(num_bytes)
            metrics.GUEST_BUSY.labels(name).set(busy)
            host_state.instance.set_guests(num_bytes, min(1.0, busy))
        self._shared = {guest.target for guest in self._guests}


async def _detach(host_state: HostState, guest_id: str) -> None:
    await host_state.link().ask_workers(call(MigrationApi.banaserve_migration_detach, guest_id))


@contextlib.asynccontextmanager
async def live_migration(
    cluster: Cluster,
    launcher: Launcher,
    config: VllmConfig,
    run: RunDir,
    guest_share: float,
    transport: str,
) -> AsyncIterator[Coordinator]:
    """Run a coordinator for the instances of ``cluster``, with its guest pool and guest monitor.

    Args:
        guest_share: Share of an instance's device that guests beside it may take.
    """
    guests = GuestPool(launcher, run, transport, guest_share)
    facts = model_facts(config)
    coordinator = Coordinator(cluster.instances, guests, facts, lambda _: available_memory_bytes())
    monitor = GuestMonitor(coordinator)
    cluster.supervisor.on_ended.append(coordinator.instance_ended)
    monitor.start()
    try:
        yield coordinator
    finally:
        await monitor.stop()
        await coordinator.stop()
