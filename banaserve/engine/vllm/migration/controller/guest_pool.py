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
from pathlib import Path

from banaserve.engine.vllm.launch.launcher import Launcher
from banaserve.engine.vllm.migration.controller.host_client import HostClient
from banaserve.engine.vllm.migration.controller.process_stats import ProcessUsage
from banaserve.engine.vllm.migration.controller.shares import Shares
from banaserve.engine.vllm.migration.controller.timeouts import MoveStage, timeout_s
from banaserve.engine.vllm.migration.rpc.messages import GuestAddress
from banaserve.engine.vllm.migration.worker_api import LinkState
from banaserve.errors import MigrationError
from banaserve.platform import processes
from banaserve.types import InstanceId

logger = logging.getLogger(__name__)

_POLL_S = 0.02
_END_S = 1.0
"""For what a process of a guest that has been let go of does last."""


@dataclass
class GuestHandle:
    """One guest: a process, or one for each tensor-parallel rank of its host.

    Attributes:
        pids: In the order of the ranks.
        moves: Ids of moves that are under way to it.
        units: Ids of units that run in it.
        idle_since_s: Since when it has neither; None while it has.
        detached_s: When its host has let go of it; it ends by itself then.
        stopped: How often in a row it has been seen stopped by a signal.
        share: Of its target's device, that it has been told to take at most.
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
    usages: dict[int, ProcessUsage] = field(default_factory=dict)

    @property
    def num_bytes(self) -> int:
        """Memory of its own."""
        return sum(usage.num_bytes for usage in self.usages.values())

    @property
    def busy_fraction(self) -> float:
        """CPU time against wall time, lately."""
        return sum(usage.busy_fraction for usage in self.usages.values())

    @property
    def is_idle(self) -> bool:
        return not self.moves and not self.units

    @property
    def can_take(self) -> bool:
        """Whether another unit may be moved here: it takes them one by one."""
        return not self.moves and self.detached_s is None

    def kill(self) -> None:
        for pid in self.pids:
            _kill(pid)


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)


class GuestPool:
    """All guests of a run.

    Args:
        launcher: Starts them.
        logs: Folder of their logs.
        sockets: Private folder of the run, with a short path.
        transport: By which KV travels.
        on_end: Called when a guest's process has ended, whatever the reason.
        share: Of an instance's device that guests beside it may take, unless it is set for one.

    Attributes:
        shares: What guests may take.
    """

    def __init__(
        self,
        launcher: Launcher,
        logs: Path,
        sockets: Path,
        transport: str,
        on_end: Callable[[GuestHandle], None],
        share: float = 1.0,
    ) -> None:
        self.shares = Shares(share)
        self._launcher = launcher
        self._logs = logs
        self._sockets = sockets
        self._transport = transport
        self._on_end = on_end
        self._secret = secrets.token_hex(32)
        self._numbers = itertools.count()
        self._guests: dict[str, GuestHandle] = {}
        self._watches: set[asyncio.Task[None]] = set()

    def __iter__(self) -> Iterator[GuestHandle]:
        return iter(list(self._guests.values()))

    def get(self, guest_id: str) -> GuestHandle | None:
        return self._guests.get(guest_id)

    def beside(self, target: InstanceId) -> list[GuestHandle]:
        """All whose target it is."""
        return [guest for guest in self if guest.target == target]

    def share_of(self, guest: GuestHandle) -> float:
        """Of its target's device, that a guest may take."""
        return self.shares.bound(guest.target) / max(1, len(self.beside(guest.target)))

    def free_for(
        self, host: InstanceId, target: InstanceId, *, loads_weights: bool
    ) -> GuestHandle | None:
        """A guest that can take another unit: one that serves would stand still to load any."""
        for guest in self:
            if (guest.host, guest.target) == (host, target) and guest.can_take:
                if guest.units and loads_weights:
                    continue
                return guest
        return None

    async def start(
        self, host: InstanceId, target: InstanceId, link: HostClient, move_id: str
    ) -> GuestHandle:
        """Start a guest for a move and let its host connect to it.

        Raises:
            MigrationError: It could not be started or reached.
            InstanceDeadError: The host has ended, or the launcher's process has.
        """
        guest_id = f"g{next(self._numbers)}-{host}-{target}"
        addresses = await self._addresses(guest_id, host, target, link.num_ranks)
        log_path = self._logs / f"guest-{host}-{target}.log"
        guest = GuestHandle(guest_id, host, target, (), moves={move_id})
        try:
            for address in addresses:
                pid = await self._launcher.start_guest(address, log_path, link.vllm_argv)
                guest.pids += (pid,)
        except BaseException:
            guest.kill()
            raise
        self._guests[guest.id] = guest
        watch = asyncio.create_task(self._watch(guest, addresses[0].rendezvous))
        self._watches.add(watch)
        watch.add_done_callback(self._watches.discard)
        try:
            await link.attach(addresses)
            await self._until_ready(guest, link)
            if (fraction := self.share_of(guest)) < 1.0:
                await link.set_share(guest.id, fraction)
                guest.share = fraction
        except BaseException:
            guest.kill()
            raise
        return guest

    async def _addresses(
        self, guest_id: str, host: InstanceId, target: InstanceId, num_ranks: int
    ) -> list[GuestAddress]:
        """Of its processes, in the order of the ranks.

        Raises:
            MigrationError: There would be several, on another machine.
        """
        if num_ranks == 1:
            return [await self._address(guest_id, host, target)]
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
        place = await self._launcher.guest_place(host, target, name, self._transport, self._sockets)
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

    async def _until_ready(self, guest: GuestHandle, link: HostClient) -> None:
        loop = asyncio.get_running_loop()
        until_s = loop.time() + timeout_s(MoveStage.START, 0)
        while loop.time() < until_s:
            known = (await link.status()).guests.get(guest.id)
            if known is not None and known.state is LinkState.READY:
                return
            is_lost = known is not None and known.state is LinkState.LOST
            if is_lost or guest.id not in self._guests:
                reason = (known.reason if known is not None else "") or "it ended while it started"
                raise MigrationError(f"guest beside {guest.target}: {reason}; see {self._logs}")
            await asyncio.sleep(_POLL_S)
        raise MigrationError(f"the guest beside {guest.target} did not start; see {self._logs}")

    async def _watch(self, guest: GuestHandle, rendezvous: str) -> None:
        """With one of its processes the others end: they would wait for its part of a sum."""
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
            with contextlib.suppress(FileNotFoundError):
                os.unlink(rendezvous)
        self._guests.pop(guest.id, None)
        self._on_end(guest)

    async def stop(self) -> None:
        """End all of them."""
        for guest in self:
            guest.kill()
        for watch in self._watches:
            watch.cancel()
        await asyncio.gather(*self._watches, return_exceptions=True)
