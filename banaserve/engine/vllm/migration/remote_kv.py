"""KV that lies in a guest: one-sided copies between it and memory of this process."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from banaserve.engine.vllm.migration.host_kv import Run
from banaserve.errors import GuestLostError
from banaserve.transport.errors import TransportError
from banaserve.transport.interface import RegionDescriptor, Ticket, Transport
from banaserve.transport.memory import Memory

OPEN_TIMEOUT_S = 5.0
_SLOWEST_BYTES_PER_S = 50e6
_GRACE_S = 2.0


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
        runs: Mapping[str, Sequence[Run]],
    ) -> None:
        self.epoch = descriptor.epoch
        self.runs = {name: list(found) for name, found in runs.items()}
        self._places = dict(places)
        self._strides = {name: sum(r.num_bytes for r in found) for name, found in runs.items()}
        self._bulk = transport.open(descriptor, OPEN_TIMEOUT_S)
        self._urgent = transport.open(descriptor, OPEN_TIMEOUT_S)

    def warm(self, name: str, num_blocks: int) -> None:
        """Let the first blocks of one attention be backed by memory before they are copied."""
        try:
            self._bulk.warm(self._places[name], num_blocks * self._strides[name])
        except TransportError as error:
            raise GuestLostError(str(error)) from error

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
        region = self._urgent if urgent else self._bulk
        begin = region.submit_write if to_guest else region.submit_read
        pages = np.asarray(blocks, np.int64) * self._strides[name] + self._places[name]
        tickets = []
        packed = 0
        try:
            for run in self.runs[name]:
                offsets = local_offsets + run.in_page
                tickets.append(begin(local, offsets, pages + packed, run.num_bytes, self.epoch))
                packed += run.num_bytes
        except TransportError as error:
            cancel_all(tickets)
            raise GuestLostError(str(error)) from error
        return tickets

    def close(self) -> None:
        self._bulk.close()
        self._urgent.close()


def wait_all(tickets: Sequence[Ticket], num_bytes: int) -> None:
    """Return when all copies have ended; the time they get grows with their bytes.

    Raises:
        GuestLostError: One has failed or takes too long; none touches local memory any more.
    """
    try:
        for ticket in tickets:
            ticket.wait(copy_deadline_s(num_bytes))
    except TransportError as error:
        cancel_all(tickets)
        raise GuestLostError(f"a copy has failed: {error}") from error


def cancel_all(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        ticket.cancel()


def copy_deadline_s(num_bytes: int) -> float:
    """How long a copy may take before the guest is given up."""
    return _GRACE_S + num_bytes / _SLOWEST_BYTES_PER_S
