"""The guests' processes: started through the launcher, watched, and ended."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import os
import secrets
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from banaserve.base.config.serve_config import LEAST_GUEST_SHARE
from banaserve.base.errors import MigrationError
from banaserve.base.platform import processes
from banaserve.base.platform.run_dir import RunDir
from banaserve.base.tasks import end_tasks
from banaserve.base.types import InstanceId
from banaserve.contracts.rpc.typed_rpc import call
from banaserve.migration.ranks import check_devices
from banaserve.migration.rpc.messages import GuestAddress
from banaserve.migration.worker_api import LinkState, MigrationApi
from banaserve.serving.instances.instance import Instance
from banaserve.serving.launch.launcher import Launcher
from banaserve.serving.launch.messages import StartGuest
from banaserve.serving.moves.host_client import HostClient
from banaserve.serving.moves.move_plan import timeout_s
from banaserve.serving.moves.process_stats import ProcessUsage

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_END_S = 1.0
"""Time that the other processes of a detached guest may outlive its first one, in seconds."""


@dataclass
class GuestHandle:
    """Guest: one process, or one process for each tensor-parallel rank of its host.

    Attributes:
        pids: Process ids in the order of the ranks.
        moves: Ids of moves that are under way to the guest.
        idle_since_s: Time since which the guest has had no move and no unit, on the event loop's
            clock; None while it has any.
        detached_s: Time at which its host detached it, on the event loop's clock; the guest then
            ends by itself. None while it is attached.
        stopped: Number of consecutive looks that found the guest stopped by a signal.
        share: Share of its target's device that the guest was last told to take at most.
        way: Way of its KV and large activations, see ``GuestStatus``.
    """

    id: str
    host: InstanceId
    target: InstanceId
    pids: tuple[int, ...]
    moves: set[str] = field(default_factory=set)
    units: set[str] = field(default_factory=set)
    idle_since_s: float | None = None
    detached_s: float | None = None
    stopped: int = 0
    share: float = 1.0
    way: str = ""
    usages: dict[int, ProcessUsage] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Memory of the guest's own, in bytes."""
        return sum(usage.num_bytes for usage in self.usages.values())

    @property
    def busy_fraction(self) -> float:
        """Recent CPU time as a fraction of wall time, summed over the guest's processes."""
        return sum(usage.busy_fraction for usage in self.usages.values())

    @property
    def is_idle(self) -> bool:
        return not self.moves and not self.units

    @property
    def can_take(self) -> bool:
        """True if another unit may be moved here: a guest takes one unit at a time."""
        return not self.moves and self.detached_s is None

    def kill(self) -> None:
        for pid in self.pids:
            _kill(pid)

    async def tell_share(self, link: HostClient, fraction: float) -> None:
        """Bound the guest's share of its target's device; see ``HostClient`` for errors."""
        await link.ask_workers(call(MigrationApi.banaserve_migration_share, self.id, fraction))
        self.share = fraction


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class GuestPool:
    """All guests of a run.

    Args:
        share: Share of an instance's device that guests beside it may take, for instances that
            have no share of their own.

    Attributes:
        has_lost_one: Event set when a guest's processes have ended, for any reason.
    """

    def __init__(self, launcher: Launcher, run: RunDir, transport: str, share: float = 1.0) -> None:
        self.has_lost_one = asyncio.Event()
        self._share = share
        self._shares: dict[InstanceId, float] = {}
        self._launcher = launcher
        self._run = run
        self._transport = transport
        self._secret = secrets.token_hex(32)
        self._numbers = itertools.count()
        self._guests: dict[str, GuestHandle] = {}
        self._watches: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[GuestHandle]:
        return iter(list(self._guests.values()))

    def get(self, guest_id: str) -> GuestHandle | None:
        return self._guests.get(guest_id)

    def beside(self, target: InstanceId) -> list[GuestHandle]:
        """Return all guests beside ``target``."""
        return [guest for guest in self if guest.target == target]

    def share_of(self, guest: GuestHandle) -> float:
        """Return the share of its target's device that a guest may take."""
        return self.bound(guest.target) / max(1, len(self.beside(guest.target)))

    def bound(self, target: InstanceId) -> float:
        """Return the share of the device of ``target`` that guests beside it may take together."""
        return self._shares.get(target, self._share)

    def set_bound(self, target: InstanceId, fraction: float) -> None:
        """Bound the share of all guests beside ``target``, also of those that come later.

        Raises:
            MigrationError: The fraction is out of range.
        """
        if not LEAST_GUEST_SHARE <= fraction <= 1.0:
            raise MigrationError(
                f"guests take {LEAST_GUEST_SHARE:g} to 1 of a device, not {fraction:g}"
            )
        self._shares[target] = fraction

    def forget_bound(self, target: InstanceId) -> None:
        """Forget the bound of an instance that has been removed."""
        self._shares.pop(target, None)

    def free_for(
        self, host: InstanceId, target: InstanceId, *, loads_weights: bool
    ) -> GuestHandle | None:
        """Return a guest that can take another unit; loading weights would stall a serving one."""
        for guest in self:
            is_fitting = (guest.host, guest.target) == (host, target) and guest.can_take
            if is_fitting and not (guest.units and loads_weights):
                return guest
        return None

    async def start(
        self,
        instance: Instance,
        target: InstanceId,
        link: HostClient,
        move_id: str,
        check: Callable[[], None],
    ) -> GuestHandle:
        """Start a guest for a move of ``instance``'s modules, and let its host connect to it.

        Args:
            check: Function that raises an exception if the move is no longer wanted, called until
                the guest is ready.

        Raises:
            MigrationError: The guest could not be started or reached.
            InstanceDeadError: The host has ended, or the launcher's process has.
        """
        host = instance.id
        guest_id = f"g{next(self._numbers)}-{host}-{target}"
        addresses = await self._addresses(guest_id, host, target, instance.num_ranks)
        log_path = self._run.logs / f"guest-{host}-{target}.log"
        guest = GuestHandle(guest_id, host, target, (), moves={move_id})
        try:
            for address in addresses:
                order = StartGuest(address, str(log_path), instance.vllm_argv)
                guest.pids += (await self._launcher.start(order),)
            self._guests[guest.id] = guest
            watch = asyncio.create_task(self._watch(guest, addresses[0].rendezvous))
            self._watches.add(watch)
            watch.add_done_callback(self._watches.discard)
            await link.ask_workers(call(MigrationApi.banaserve_migration_attach, addresses))
            await self._until_ready(guest, link, check)
            if (fraction := self.share_of(guest)) < 1.0:
                await guest.tell_share(link, fraction)
        except BaseException:
            guest.kill()
            raise
        return guest

    async def _addresses(
        self, guest_id: str, host: InstanceId, target: InstanceId, num_ranks: int
    ) -> list[GuestAddress]:
        """Return the addresses of a guest's processes, in the order of the ranks."""
        if num_ranks == 1:
            return [await self._address(guest_id, host, target)]
        if devices := self._launcher.devices_of(target):
            check_devices(num_ranks, len(devices.split(",")))
        found = [await self._address(guest_id, host, target, rank) for rank in range(num_ranks)]
        if any(address.is_elsewhere for address in found):
            raise MigrationError(
                f"{host} has {num_ranks} tensor-parallel ranks: these can go to guests on its own "
                f"machine alone, and {target} is on another"
            )
        return found

    async def _address(
        self, guest_id: str, host: InstanceId, target: InstanceId, rank: int | None = None
    ) -> GuestAddress:
        name = guest_id if rank is None else f"{guest_id}.{rank}"
        sockets, transport = self._run.sockets, self._transport
        place = await self._launcher.guest_place(host, target, name, transport, sockets)
        return GuestAddress(
            guest_id=guest_id,
            channel=place.channel,
            token=secrets.token_hex(32),
            transport=place.transport,
            folder=place.folder,
            secret=self._secret,
            listen_host=place.listen_host,
            target=target,
            is_elsewhere=place.is_elsewhere,
            rank=rank or 0,
            rendezvous="" if rank is None else f"{place.folder}/{guest_id}.ranks",
        )

    async def _until_ready(
        self, guest: GuestHandle, link: HostClient, check: Callable[[], None]
    ) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s("starting", 0)
        while loop.time() < until_s:
            check()
            status = await link.ask_workers(call(MigrationApi.banaserve_migration_status, False))
            known = status.guests.get(guest.id)
            if known is not None and known.state is LinkState.READY:
                guest.way = known.way
                return
            is_lost = known is not None and known.state is LinkState.LOST
            if is_lost or guest.id not in self._guests:
                reason = (known.reason if known is not None else "") or "it ended while it started"
                raise MigrationError(f"guest beside {guest.target}: {reason}; see {self._run.logs}")
            await asyncio.sleep(_POLL_S)
        raise MigrationError(f"the guest beside {guest.target} did not start; see {self._run.logs}")

    async def _watch(self, guest: GuestHandle, rendezvous: str) -> None:
        """Kill a guest's other processes once one ends: they would wait for its partial sums."""
        ends = [asyncio.create_task(processes.wait_ended(pid)) for pid in guest.pids]
        try:
            _, left = await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            if left and guest.detached_s is not None:
                _, left = await asyncio.wait(left, timeout=_END_S)
            for pid, end in zip(guest.pids, ends, strict=True):
                if end in left:
                    _kill(pid)
            if left:
                await asyncio.wait(left)
        finally:
            for end in ends:
                end.cancel()
        if rendezvous:
            with contextlib.suppress(OSError):
                os.unlink(rendezvous)
        self._guests.pop(guest.id, None)
        self.has_lost_one.set()

    async def stop(self) -> None:
        """Kill all guests."""
        for guest in self:
            guest.kill()
        await end_tasks(*self._watches)
