"""Guests of a virtual machine, and the memory that their hosts copy to.

The real guest server runs on a thread of the machine; its channel and its transport are virtual.
"""

from __future__ import annotations

import asyncio
import itertools
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any

from banaserve.base.platform.stall_watch import Pulse
from banaserve.migration.guest.server import GuestServer
from banaserve.migration.rpc.messages import GuestAddress
from banaserve.transport.errors import PeerGoneError, RefusedError, StaleEpochError
from banaserve.transport.interface import TransportOptions
from banaserve.transport.memory import Memory, copy_runs
from banaserve.transport.regions.descriptor import Offsets, RegionDescriptor
from banaserve.transport.regions.offered_region import reserve
from seeded_machine import Machine, Process, Troubles
from seeded_threads import KilledError, Thread, VirtualChannel, current, sleep, wait, wake

ACCEPT_S = 60.0


@dataclass
class _Listener:
    """Where a guest waits for its host."""

    owner: Process
    channel: VirtualChannel | None = None
    waiting: list[Thread] = field(default_factory=list)


class Network:
    """Channels and regions of all processes of a machine."""

    def __init__(self, troubles: Troubles) -> None:
        self.troubles = troubles
        self.listeners: dict[str, _Listener] = {}
        self.channels: list[VirtualChannel] = []
        self.regions: dict[bytes, OfferedDouble] = {}
        self._numbers = itertools.count(1)

    def connect(self, where: str, _: TransportOptions, __: float) -> VirtualChannel:
        """See ``transport.channels.connect.connect``."""
        listener = self.listeners.pop(where.removeprefix("unix:"), None)
        if listener is None:
            raise PeerGoneError("nobody listens there")
        mine, theirs = VirtualChannel.pair(current().owner, listener.owner, self.troubles.draws)
        self.channels += [mine, theirs]
        listener.channel = theirs
        wake(listener.waiting)
        return mine

    def transport(self, name: str, _: TransportOptions) -> VirtualTransport:
        """See ``transport.registry.create``."""
        assert name == "shm"
        return VirtualTransport(self, current().owner)

    def number(self) -> bytes:
        return next(self._numbers).to_bytes(16, "big")

    def lose(self, process: Process) -> None:
        """A process is dead: what it was connected to is gone."""
        for channel in [one for one in self.channels if one.owner is process]:
            self.channels.remove(channel)
            channel.close()
        for path in [at for at, one in self.listeners.items() if one.owner is process]:
            del self.listeners[path]
        for name in [at for at, one in self.regions.items() if one.owner is process]:
            del self.regions[name]


class OfferedDouble:
    """A region of a guest; see ``transport.interface.OfferedRegion``."""

    def __init__(self, network: Network, owner: Any, num_bytes: int, epoch: int) -> None:
        self.owner, self.epoch = owner, epoch
        self.memory = reserve(num_bytes)
        name = network.number()
        self.descriptor = RegionDescriptor("shm", name, num_bytes, epoch, "here")
        self._network = network
        network.regions[name] = self

    def advance(self, epoch: int, _: float) -> None:
        if epoch < self.epoch:
            raise RefusedError(f"epoch {epoch} lies before {self.epoch}")
        self.epoch = epoch

    def release(self, first_byte: int, num_bytes: int) -> int:
        raise AssertionError("guests give back whole units")

    def close(self) -> None:
        self._network.regions.pop(self.descriptor.region_id, None)


class _Copies:
    """A ticket: the bytes move at one moment, at the latest when it is waited for."""

    def __init__(self, region: RemoteDouble, run: Any, epoch: int) -> None:
        self._region, self._run, self._epoch = region, run, epoch
        self._failure: Exception | None = None
        self._has_ended = False
        if region.network.troubles.draws.random() < 0.5:
            self._move()

    def _move(self) -> None:
        self._has_ended = True
        offered = self._region.network.regions.get(self._region.descriptor.region_id)
        if offered is None or self._region.is_closed:
            self._failure = PeerGoneError("the peer is gone")
        elif offered.epoch != self._epoch:
            self._failure = StaleEpochError(f"the region is at {offered.epoch}, not {self._epoch}")
        else:
            self._run(offered.memory)

    def poll(self) -> bool:
        return self._has_ended

    def wait(self, timeout_s: float) -> None:
        del timeout_s
        draws = self._region.network.troubles.draws
        sleep(draws.uniform(0.0, 0.01))
        if not self._has_ended:
            self._move()
        if self._failure is not None:
            raise self._failure

    def cancel(self) -> bool:
        before, self._has_ended = self._has_ended, True
        return not before


class RemoteDouble:
    """A guest's region as its host sees it; see ``RemoteRegion``."""

    def __init__(self, network: Network, descriptor: RegionDescriptor) -> None:
        self.network, self.descriptor = network, descriptor
        self.is_closed = False

    def submit_write(
        self, local: Memory, here: Offsets, there: Offsets, num_bytes: int, epoch: int
    ) -> _Copies:
        def run(region: Memory) -> None:
            copy_runs(region, local, there, here, num_bytes)  # type: ignore[arg-type]

        return _Copies(self, run, epoch)

    def submit_read(
        self, local: Memory, here: Offsets, there: Offsets, num_bytes: int, epoch: int
    ) -> _Copies:
        def run(region: Memory) -> None:
            copy_runs(local, region, here, there, num_bytes)  # type: ignore[arg-type]

        return _Copies(self, run, epoch)

    def warm(self, first_byte: int, num_bytes: int) -> None: ...

    def close(self) -> None:
        self.is_closed = True


class VirtualTransport:
    """Copies between processes of a machine; see ``transport.interface.Transport``."""

    name = "shm"

    def __init__(self, network: Network, owner: Any) -> None:
        self._network, self._owner = network, owner

    def offer(self, num_bytes: int, epoch: int) -> OfferedDouble:
        return OfferedDouble(self._network, self._owner, num_bytes, epoch)

    def open(self, descriptor: RegionDescriptor, _: float) -> RemoteDouble:
        if current().is_killed:
            raise KilledError
        if descriptor.region_id not in self._network.regions:
            raise PeerGoneError("nobody offers this region")
        return RemoteDouble(self._network, descriptor)

    def close(self) -> None: ...


# ---- processes


class GuestProcess:
    """What runs in a guest's process; see ``seeded_machine.Machine``."""

    def __init__(self, machine: Machine, network: Network, address: GuestAddress, weights: int):
        self.name = address.guest_id
        self._machine, self._network = machine, network
        self._address, self._weights = address, weights
        self.server: GuestServer | None = None

    def die(self) -> None: ...

    def end(self) -> None: ...

    def main(self) -> None:
        """On the process's own thread, see ``banaserve.mains.guest.serve``."""
        process: Any = current().owner
        troubles = self._network.troubles
        sleep(troubles.some_s(0.5))
        if troubles.happen(0.1):
            self._end(process)
            return
        listener = _Listener(process)
        self._network.listeners[self._address.channel] = listener
        if wait(listener.waiting, ACCEPT_S):
            assert listener.channel is not None
            transport: Any = VirtualTransport(self._network, process)
            config: Any = SimpleNamespace(number=self._weights)
            channel: Any = listener.channel
            server = GuestServer(config, channel, transport, self._address.token)
            self.server = server
            server.serve()
        self._end(process)

    def _end(self, process: Process) -> None:
        if not process.dying.is_set():
            asyncio.get_running_loop().call_soon(self._machine.kill, process.pid)


class VirtualProcessHandle:
    """See ``platform.processes.ProcessHandle``."""

    def __init__(self, machine: Machine, pid: int) -> None:
        self._machine, self._pid = machine, pid

    def kill(self) -> None:
        process = self._machine.processes[self._pid]
        if not process.ended.is_set():
            self._machine.kill(self._pid)

    def close(self) -> None: ...


class VirtualPulse(Pulse):
    """Nothing tells whether a process of the machine works: it counts as one that stands still."""

    def __init__(self, _: int | None) -> None:
        super().__init__(None)
