"""KV on a guest's device: copies land in host memory, and the guest takes them from there."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import numpy as np
import numpy.typing as npt

from banaserve.engine.vllm.migration import messages
from banaserve.engine.vllm.migration.guest_link import GuestLink
from banaserve.engine.vllm.migration.host_kv import Run
from banaserve.engine.vllm.migration.remote_kv import RemoteKv, wait_all
from banaserve.errors import GuestLostError, MigrationError
from banaserve.transport.interface import RegionDescriptor, Ticket
from banaserve.transport.memory import Memory

_Offsets = npt.NDArray[np.int64]


class LandedKv(RemoteKv):
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
        link: GuestLink,
        unit_id: str,
        descriptor: RegionDescriptor,
        runs: Mapping[str, Sequence[Run]],
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
    ) -> None:
        """Copy blocks of some attentions; returns when they are where they should be.

        Args:
            pages: Offset of each block's page in ``local``, laid out as the host's, by attention.

        Raises:
            GuestLostError: The guest is gone, or takes copies of another epoch.
        """
        each_bytes = sum(self._page_bytes[name] for name in pages)
        per_time = self._half_bytes // each_bytes
        with self._halves[urgent]:
            for first in range(0, len(blocks), per_time):
                part = slice(first, min(first + per_time, len(blocks)))
                mine = {name: offsets[part] for name, offsets in pages.items()}
                self._piece(blocks[part], local, mine, to_guest, urgent)

    def _piece(
        self,
        blocks: Sequence[int],
        local: Memory,
        pages: Mapping[str, _Offsets],
        to_guest: bool,
        urgent: bool,
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
            self._link.ask(request, messages.Done)
        except MigrationError as refused:
            raise GuestLostError(str(refused)) from refused
