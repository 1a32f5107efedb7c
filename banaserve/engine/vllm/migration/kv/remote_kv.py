"""KV of a unit in a guest: one-sided copies between it and memory of this process.

``StagedRemoteKv`` is for guests with KV on a device: copies end in host memory of the guest, which
takes the blocks from there.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from banaserve.engine.vllm.migration.kv.host_kv import KvRun, spans
from banaserve.engine.vllm.migration.rpc import messages
from banaserve.engine.vllm.migration.rpc.guest_client import GuestClient
from banaserve.errors import GuestLostError, MigrationError
from banaserve.transport.errors import PeerGoneError, TransportError
from banaserve.transport.interface import Offsets, RegionDescriptor, Ticket, Transport
from banaserve.transport.memory import Memory

OPEN_TIMEOUT_S = 5.0
_SLOWEST_BYTES_PER_S = 50e6
STEP_GRACE_S = 2.0
BACKGROUND_GRACE_S = 30.0
"""Beyond what its bytes should take: a copy that steps wait for, and one that nobody waits for."""

_Plan = tuple[Memory, Offsets, Offsets, int, int]
"""Local memory, offsets in it and in the region, bytes at each, epoch."""
_Offsets = npt.NDArray[np.int64]


class RemoteKv:
    """The KV of one unit in a guest, with the host's block ids.

    Opened twice: what a step waits for must not queue behind a copy in the background.

    Args:
        places: Offset of each attention's KV in the region.
        runs: Of the host's page, by attention; in the guest they lie one behind the other.
        epoch: Of the offer.

    Attributes:
        epoch: Under which the guest accepts copies.
        runs: As given.
    """

    def __init__(
        self,
        transport: Transport,
        descriptor: RegionDescriptor,
        places: Mapping[str, int],
        runs: Mapping[str, Sequence[KvRun]],
    ) -> None:
        self.epoch = descriptor.epoch
        self.runs = {name: list(found) for name, found in runs.items()}
        self._places = dict(places)
        self._strides = {name: sum(r.num_bytes for r in found) for name, found in runs.items()}
        self._bulk = _Connection(transport, descriptor)
        try:
            self._urgent = _Connection(transport, descriptor)
        except TransportError:
            self._bulk.close()
            raise

    def warm(self, blocks: Sequence[int]) -> None:
        """Spare the copies of these blocks their page faults.

        Raises:
            TransportError: The guest takes no such copies.
            OSError: The system has no memory to map them.
        """
        for name, place in self._places.items():
            stride = self._strides[name]
            for first, count in spans(blocks):
                self._bulk.region.warm(place + first * stride, count * stride)

    def copy_units(
        self,
        blocks: Sequence[int],
        local: Memory,
        starts: Mapping[str, int],
        page_bytes: int,
        *,
        to_guest: bool,
    ) -> list[Ticket]:
        """Begin to copy blocks of all attentions, with as few submissions as their runs allow.

        Args:
            starts: Where in ``local`` each attention's pages begin, of ``page_bytes`` each.

        Raises:
            GuestLostError: The guest is gone, or takes copies of another epoch.
        """
        ids = np.asarray(blocks, np.int64)
        here: dict[int, list[npt.NDArray[np.int64]]] = {}
        there: dict[int, list[npt.NDArray[np.int64]]] = {}
        for name, place in self._places.items():
            packed = place
            for run in self.runs[name]:
                length = run.num_bytes
                here.setdefault(length, []).append(ids * page_bytes + starts[name] + run.in_page)
                there.setdefault(length, []).append(ids * self._strides[name] + packed)
                packed += length
        plans = (
            (local, np.concatenate(offsets), np.concatenate(there[length]), length, self.epoch)
            for length, offsets in here.items()
        )
        return self._begin(plans, to_guest, urgent=False)

    def copy(
        self,
        name: str,
        blocks: Sequence[int],
        local: Memory,
        local_offsets: npt.NDArray[np.int64],
        *,
        to_guest: bool,
        urgent: bool = False,
    ) -> list[Ticket]:
        """Begin to copy blocks of one attention, run by run of the page.

        Args:
            local_offsets: Of each block's page in ``local``, laid out as the host's.

        Raises:
            GuestLostError: The guest is gone, or takes copies of another epoch.
        """
        pages = np.asarray(blocks, np.int64) * self._strides[name] + self._places[name]
        plans: list[_Plan] = []
        packed = 0
        for run in self.runs[name]:
            offsets = local_offsets + run.in_page
            plans.append((local, offsets, pages + packed, run.num_bytes, self.epoch))
            packed += run.num_bytes
        return self._begin(plans, to_guest, urgent)

    def _begin(self, plans: Iterable[_Plan], to_guest: bool, urgent: bool) -> list[Ticket]:
        connection = self._urgent if urgent else self._bulk
        tickets: list[Ticket] = []
        try:
            for plan in plans:
                tickets.append(connection.submit(plan, to_guest))
        except TransportError as error:
            cancel_all(tickets)
            raise GuestLostError(str(error)) from error
        return tickets

    def close(self) -> None:
        self._bulk.close()
        self._urgent.close()


class _Connection:
    """One opening of a region. Where a copy has failed or was cancelled, it is opened again.

    Attributes:
        region: As opened last.
    """

    def __init__(self, transport: Transport, descriptor: RegionDescriptor) -> None:
        self.region = transport.open(descriptor, OPEN_TIMEOUT_S)
        self._transport = transport
        self._descriptor = descriptor
        self._last: Ticket | None = None
        self._lock = threading.Lock()
        self._closed = False

    def submit(self, plan: _Plan, to_guest: bool) -> Ticket:
        """Begin a copy.

        Raises:
            TransportError: The guest does not answer, or takes copies of another epoch.
        """
        with self._lock:
            if self._last is not None and _has_failed(self._last):
                self._open_again()
            try:
                self._last = self._begin(plan, to_guest)
            except PeerGoneError:
                self._open_again()
                self._last = self._begin(plan, to_guest)
            return self._last

    def close(self) -> None:
        with self._lock:
            self._closed = True
            self.region.close()

    def _begin(self, plan: _Plan, to_guest: bool) -> Ticket:
        return (self.region.submit_write if to_guest else self.region.submit_read)(*plan)

    def _open_again(self) -> None:
        if self._closed:
            raise PeerGoneError("the region is closed")
        self._last = None
        self.region.close()
        self.region = self._transport.open(self._descriptor, OPEN_TIMEOUT_S)


def _has_failed(ticket: Ticket) -> bool:
    """Copies of one connection end in their order, so the last one tells of those before it."""
    if not ticket.poll():
        return False
    try:
        ticket.wait(0.0)
    except TransportError:
        return True
    return False


def wait_all(tickets: Sequence[Ticket], num_bytes: int, grace_s: float = STEP_GRACE_S) -> None:
    """Return when all copies have ended; the time they get grows with their bytes.

    Args:
        grace_s: Time for which a guest may stand still meanwhile. A guest whose process has ended
            is found at once.

    Raises:
        GuestLostError: One has failed or takes too long; none touches local memory any more.
    """
    try:
        for ticket in tickets:
            ticket.wait(grace_s + num_bytes / _SLOWEST_BYTES_PER_S)
    except TransportError as error:
        cancel_all(tickets)
        raise GuestLostError(f"a copy has failed: {error}") from error


def cancel_all(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.cancel()


class StagedRemoteKv(RemoteKv):
    """The KV of one unit on a guest's device, with the host's block ids.

    Its region holds pages that are on their way. One half of it is for what a step waits for, the
    other one for copies in the background. Calls return when the bytes are there, without tickets.

    Args:
        link: To the guest, which is asked to take and to give pages.
        descriptor: Of the region.
        runs: Of the host's page, by attention; in the guest's page they lie one behind the other.
        num_bytes: Of the region; both halves have room for a block of all attentions.
    """

    def __init__(
        self,
        link: GuestClient,
        unit_id: str,
        descriptor: RegionDescriptor,
        runs: Mapping[str, Sequence[KvRun]],
        num_bytes: int,
    ) -> None:
        super().__init__(link.transport, descriptor, dict.fromkeys(runs, 0), runs)
        self._link = link
        self._unit_id = unit_id
        self._half_bytes = num_bytes // 2
        self._page_bytes = {name: sum(r.num_bytes for r in found) for name, found in runs.items()}
        self._halves = threading.Lock(), threading.Lock()

    def warm(self, blocks: Sequence[int]) -> None:
        """Pages that land are few, and are used again and again."""

    def copy_units(
        self,
        blocks: Sequence[int],
        local: Memory,
        starts: Mapping[str, int],
        page_bytes: int,
        *,
        to_guest: bool,
    ) -> list[Ticket]:
        """See ``RemoteKv``."""
        ids = np.asarray(blocks, np.int64)
        pages = {name: ids * page_bytes + start for name, start in starts.items()}
        self.exchange(blocks, local, pages, to_guest=to_guest)
        return []

    def copy(
        self,
        name: str,
        blocks: Sequence[int],
        local: Memory,
        local_offsets: _Offsets,
        *,
        to_guest: bool,
        urgent: bool = False,
    ) -> list[Ticket]:
        """See ``RemoteKv``."""
        self.exchange(blocks, local, {name: local_offsets}, to_guest=to_guest, urgent=urgent)
        return []

    def exchange(
        self,
        blocks: Sequence[int],
        local: Memory,
        pages: Mapping[str, _Offsets],
        *,
        to_guest: bool,
        urgent: bool = False,
        grace_s: float = STEP_GRACE_S,
    ) -> None:
        """Copy blocks of some attentions; returns when they are where they should be.

        Args:
            pages: Offset of each block's page in ``local``, laid out as the host's, by attention.
            grace_s: See ``wait_all``.

        Raises:
            GuestLostError: The guest is gone, or takes copies of another epoch.
        """
        each_bytes = sum(self._page_bytes[name] for name in pages)
        per_time = self._half_bytes // each_bytes
        with self._halves[urgent]:
            for first in range(0, len(blocks), per_time):
                part = slice(first, min(first + per_time, len(blocks)))
                mine = {name: offsets[part] for name, offsets in pages.items()}
                self._piece(blocks[part], local, mine, to_guest, urgent, grace_s)

    def _piece(
        self,
        blocks: Sequence[int],
        local: Memory,
        pages: Mapping[str, _Offsets],
        to_guest: bool,
        urgent: bool,
        grace_s: float,
    ) -> None:
        start = self._half_bytes if urgent else 0
        request = messages.CopyPages(
            self._unit_id, self.epoch, to_guest, start, tuple(pages), tuple(map(int, blocks))
        )
        if not to_guest:
            self._ask(request)
        wait_all(
            self._submit(local, pages, start, to_guest, urgent),
            len(blocks) * sum(self._page_bytes[name] for name in pages),
            grace_s,
        )
        if to_guest:
            self._ask(request)

    def _submit(
        self,
        local: Memory,
        pages: Mapping[str, _Offsets],
        start: int,
        to_guest: bool,
        urgent: bool,
    ) -> list[Ticket]:
        """Pages land attention by attention, block by block; as few submissions as runs allow."""
        here: dict[int, list[_Offsets]] = {}
        there: dict[int, list[_Offsets]] = {}
        for name, offsets in pages.items():
            landed = start + np.arange(len(offsets), dtype=np.int64) * self._page_bytes[name]
            start += len(offsets) * self._page_bytes[name]
            packed = 0
            for run in self.runs[name]:
                here.setdefault(run.num_bytes, []).append(offsets + run.in_page)
                there.setdefault(run.num_bytes, []).append(landed + packed)
                packed += run.num_bytes
        plans = [
            (local, np.concatenate(offsets), np.concatenate(there[length]), length, self.epoch)
            for length, offsets in here.items()
        ]
        return self._begin(plans, to_guest, urgent)

    def _ask(self, request: messages.CopyPages) -> None:
        try:
            self._link.ask(request, messages.StepsDone)
        except MigrationError as refused:
            raise GuestLostError(str(refused)) from refused
