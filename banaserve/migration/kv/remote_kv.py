"""KV of a unit in a guest: one-sided copies between that KV and memory of this process.

``UnitLocation`` is the place of a unit in a guest, as the host sees it.

``StagedRemoteKv`` is for guests with KV on a device: copies end in a buffer of the guest, and the
guest moves the blocks from there to its KV.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from banaserve.base.errors import GuestLostError, MigrationError
from banaserve.migration.kv.dirty_blocks import spans
from banaserve.migration.kv.host_kv import KvRun
from banaserve.migration.rpc import messages
from banaserve.migration.rpc.guest_client import GuestClient
from banaserve.transport.errors import PeerGoneError, TransportError
from banaserve.transport.interface import Transport
from banaserve.transport.memory import Memory
from banaserve.transport.regions.descriptor import RegionDescriptor
from banaserve.transport.regions.remote_region import Ticket

OPEN_TIMEOUT_S = 5.0
_SLOWEST_BYTES_PER_S = 50e6
STEP_GRACE_S = 2.0
BACKGROUND_GRACE_S = 30.0
"""Seconds added to the time that a copy's bytes take, for step copies and background copies."""

PageOffsets = npt.NDArray[np.int64]
_Plan = tuple[Memory, PageOffsets, PageOffsets, int, int]
"""Local memory, offsets in this memory and in the region, bytes at each offset, epoch."""


class RemoteKv:
    """The KV of one unit in a guest, with the host's block ids.

    The region is opened twice: a copy that a step waits for must not queue behind a background
    copy.

    Args:
        places: Offset of each attention's KV in the region.
        runs: Runs of the host's page, by attention; in the guest these runs are contiguous.

    Attributes:
        epoch: Epoch of the offer; the guest accepts copies of this epoch only.
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
        except (TransportError, OSError):
            self._bulk.close()
            raise

    def warm(self, blocks: Sequence[int]) -> None:
        """Allocate the memory of these blocks in advance, to avoid page faults in copies.

        Raises:
            TransportError: The guest does not accept such copies.
            OSError: The system has no memory to map the pages.
        """
        for name, place in self._places.items():
            stride = self._strides[name]
            for first, count in spans(blocks):
                self._bulk.region.warm(place + first * stride, count * stride)

    def copy(
        self,
        blocks: Sequence[int],
        local: Memory,
        pages: Mapping[str, PageOffsets],
        *,
        to_guest: bool,
        urgent: bool = False,
    ) -> list[Ticket]:
        """Begin to copy blocks of some attentions.

        Args:
            pages: Offset of each block's page in ``local``, laid out as on the host, by attention.
            urgent: True if a step waits for the copy.

        Raises:
            GuestLostError: The guest is gone, or accepts copies of another epoch only.
        """
        ids = np.asarray(blocks, np.int64)
        there = {name: ids * self._strides[name] + self._places[name] for name in pages}
        return self._submit(local, pages, there, to_guest, urgent)

    def _submit(
        self,
        local: Memory,
        pages: Mapping[str, PageOffsets],
        there: Mapping[str, PageOffsets],
        to_guest: bool,
        urgent: bool,
    ) -> list[Ticket]:
        """Begin copies, with as few submissions as the lengths of the runs allow."""
        ends: dict[int, list[tuple[PageOffsets, PageOffsets]]] = {}
        for name, offsets in pages.items():
            packed = 0
            for run in self.runs[name]:
                pair = offsets + run.in_page, there[name] + packed
                ends.setdefault(run.num_bytes, []).append(pair)
                packed += run.num_bytes
        connection = self._urgent if urgent else self._bulk
        tickets: list[Ticket] = []
        try:
            for num_bytes, pairs in ends.items():
                here, beyond = map(np.concatenate, zip(*pairs, strict=True))
                plan = local, here, beyond, num_bytes, self.epoch
                tickets.append(connection.submit(plan, to_guest))
        except TransportError as error:
            cancel_all(tickets)
            raise GuestLostError(str(error)) from error
        return tickets

    def close(self) -> None:
        self._bulk.close()
        self._urgent.close()


class _Connection:
    """A connection to a region, opened again after a copy has failed or was cancelled."""

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
            TransportError: The guest does not answer, or accepts copies of another epoch only.
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
    """Return whether a copy has failed; a connection's copies end in order, so ask the last."""
    if not ticket.poll():
        return False
    try:
        ticket.wait(0.0)
    except TransportError:
        return True
    return False


def wait_all(tickets: Sequence[Ticket], num_bytes: int, grace_s: float = STEP_GRACE_S) -> None:
    """Wait until all copies have ended; the time limit grows with their bytes.

    Args:
        grace_s: Time for which the guest may stand still meanwhile, in seconds. A guest whose
            process has ended is detected at once.

    Raises:
        GuestLostError: A copy failed or took too long; no copy touches local memory any more.
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

    Its region holds pages that are on their way. One half of the region is for copies that a step
    waits for, the other half for background copies. Calls return when the copies are complete,
    without tickets.

    Args:
        link: Connection to the guest, which moves pages between the region and its device.
        num_bytes: Size of the region; both halves have room for a block of all attentions.
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
        self._halves = threading.Lock(), threading.Lock()

    @property
    def is_on_gpu(self) -> bool:
        """Return whether pages land in memory of the guest's GPU, not in host memory."""
        return self._link.lane is not None

    def warm(self, blocks: Sequence[int]) -> None:
        """Skip the warming: the region has few pages, which are used again and again."""

    def copy(
        self,
        blocks: Sequence[int],
        local: Memory,
        pages: Mapping[str, PageOffsets],
        *,
        to_guest: bool,
        urgent: bool = False,
    ) -> list[Ticket]:
        """See ``RemoteKv``."""
        self.exchange(blocks, local, pages, to_guest=to_guest, urgent=urgent)
        return []

    def exchange(
        self,
        blocks: Sequence[int],
        local: Memory,
        pages: Mapping[str, PageOffsets],
        *,
        to_guest: bool,
        urgent: bool = False,
        grace_s: float = STEP_GRACE_S,
    ) -> None:
        """Copy blocks as ``copy`` does; return when the copy is complete."""
        each_bytes = sum(self._strides[name] for name in pages)
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
        pages: Mapping[str, PageOffsets],
        to_guest: bool,
        urgent: bool,
        grace_s: float,
    ) -> None:
        start = first = self._half_bytes if urgent else 0
        landed: dict[str, PageOffsets] = {}  # by attention, then by block
        for name in pages:
            stride = self._strides[name]
            landed[name] = first + np.arange(len(blocks), dtype=np.int64) * stride
            first += len(blocks) * stride
        request = messages.CopyPages(
            self._unit_id, self.epoch, to_guest, start, tuple(pages), tuple(map(int, blocks))
        )
        if not to_guest:
            self._ask(request)
        wait_all(self._submit(local, pages, landed, to_guest, urgent), first - start, grace_s)
        if to_guest:
            self._ask(request)

    def _ask(self, request: messages.CopyPages) -> None:
        try:
            self._link.ask(request, messages.StepsDone)
        except MigrationError as refused:
            raise GuestLostError(str(refused)) from refused


class UnitLocation:
    """Location of a unit: its place in one guest.

    Attributes:
        epoch: Epoch in which the unit was activated; None until then.
        saves: True if the guest can save the unit's blocks to the store.
        described_step: Id of the last step whose description was sent to the unit.
    """

    saves = False
    described_step = 0

    def __init__(self, unit_id: str, link: GuestClient, kv: RemoteKv, weight_bytes: int) -> None:
        self.unit_id = unit_id
        self.link = link
        self.kv = kv
        self.weight_bytes = weight_bytes
        self.epoch: int | None = None

    def activate(self, epoch: int) -> None:
        """Activate the unit: from now on it accepts messages and copies of ``epoch`` only."""
        self.link.ask(messages.Activate(self.unit_id, epoch), messages.StepsDone)
        self.kv.epoch = epoch
        self.epoch = epoch

    def leave(self) -> None:
        """Release the unit in the guest; a lost guest has nothing to release."""
        self.kv.close()
        try:
            self.link.ask(messages.ReleaseUnit(self.unit_id), messages.StepsDone)
        except GuestLostError:
            return
        except MigrationError as refused:
            self.link.give_up(str(refused))

    @property
    def has_landed(self) -> bool:
        """Return whether the guest has to be asked for each copy of the unit's KV."""
        return isinstance(self.kv, StagedRemoteKv)

    @property
    def working_epoch(self) -> int:
        assert self.epoch is not None
        return self.epoch
