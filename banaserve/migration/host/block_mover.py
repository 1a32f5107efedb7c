"""Copies of whole blocks of a unit between the host and a guest, or from guest to guest."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from banaserve.migration.host.time_hook import REAL_TIME, TimeHook
from banaserve.migration.kv.host_kv import DeviceKv, HostKv
from banaserve.migration.kv.remote_kv import (
    BACKGROUND_GRACE_S,
    STEP_GRACE_S,
    PageOffsets,
    RemoteKv,
    StagedRemoteKv,
    wait_all,
)
from banaserve.migration.rpc.tensors import memory_of
from banaserve.transport.memory import Memory
from banaserve.transport.regions.offered_region import reserve

if TYPE_CHECKING:
    from banaserve.migration.units.host_unit import HostUnit  # needs vLLM, copies do not

_BOUNCE_BYTES = 8 << 20
_ROUND_BYTES = 64 << 20
"""Bytes of one submission, which an abort may have to wait for."""


class BlockMover:
    """Copier of one unit's blocks in one direction; ``source`` or ``target`` is None for the host.

    Attributes:
        num_bytes: Bytes copied by all copies, including one under way.
        each_bytes: Bytes of one block of the unit.
    """

    def __init__(
        self,
        unit: HostUnit,
        host: HostKv,
        source: RemoteKv | None,
        target: RemoteKv | None,
        time_hook: TimeHook = REAL_TIME,
    ) -> None:
        assert source is not target
        self._unit = unit
        self._host = host
        self._source = source
        self._target = target
        runs = [run for name in unit.names for run in host.runs(unit.heads(name))]
        self.num_bytes = 0
        self.each_bytes = sum(run.num_bytes for run in runs)
        self._bounce: torch.Tensor | None = None
        self._time_hook = time_hook

    def copy(
        self,
        blocks: Sequence[int],
        stop: Callable[[], bool] = lambda: False,
        *,
        in_background: bool = False,
    ) -> int:
        """Copy these blocks of every layer; blocks the caller, but does not hold the GIL.

        Args:
            stop: Function that returns whether to stop, called between two submissions.
            in_background: True if steps run during the copy. A guest that receives blocks from
                the host may then stand still for longer; a guest that sends blocks may not, since
                steps may wait for the same blocks.

        Returns:
            Number of bytes copied.

        Raises:
            GuestLostError: One of the guests is gone; the host's own KV may hold an incomplete
                copy.
        """
        began_s, before_bytes = time.perf_counter(), self.num_bytes
        if blocks and self._unit.names:
            if self._source is not None and self._target is not None:
                self._between_guests(blocks, stop)
            else:
                nobody_waits = in_background and self._source is None
                grace_s = BACKGROUND_GRACE_S if nobody_waits else STEP_GRACE_S
                self._with_host(blocks, stop, grace_s)
        copied = self.num_bytes - before_bytes
        self._time_hook.copied(copied, time.perf_counter() - began_s)
        return copied

    def _with_host(self, blocks: Sequence[int], stop: Callable[[], bool], grace_s: float) -> None:
        if self._host.device is not None:
            self._with_device(self._host.device, blocks, stop, grace_s)
            return
        remote, to_guest = self._target or self._source, self._target is not None
        assert remote is not None
        local, starts = self._host_memory()
        page_bytes = self._host.page_bytes

        def copy(part: Sequence[int]) -> None:
            ids = np.asarray(part, np.int64)
            pages = {name: ids * page_bytes + start for name, start in starts.items()}
            tickets = remote.copy(part, local, pages, to_guest=to_guest)
            wait_all(tickets, len(part) * self.each_bytes, grace_s)

        is_guarded = self._source is not None and self._unit.single_blocks is not None
        limit_bytes = _BOUNCE_BYTES if is_guarded else _ROUND_BYTES
        self._in_pieces(blocks, max(1, limit_bytes // self.each_bytes), stop, copy)

    def _in_pieces(
        self,
        blocks: Sequence[int],
        per_time: int,
        stop: Callable[[], bool],
        copy: Callable[[Sequence[int]], None],
    ) -> None:
        """Copy blocks, ``per_time`` at once, with the blocks of each piece held at the source."""
        for first in range(0, len(blocks), per_time):
            if stop():
                return
            with self._still_there(blocks[first : first + per_time]) as part:
                if part:
                    copy(part)
                    self.num_bytes += len(part) * self.each_bytes

    def _with_device(
        self, device: DeviceKv, blocks: Sequence[int], stop: Callable[[], bool], grace_s: float
    ) -> None:
        """Copy from or to a device: pack blocks into pages before, or unpack them after."""
        remote, to_guest = self._target or self._source, self._target is not None
        assert isinstance(remote, StagedRemoteKv)
        names, page_bytes = self._unit.names, self._host.page_bytes
        per_time, room = self._room(on_device=remote.is_on_gpu)

        def copy(part: Sequence[int]) -> None:
            rows = room.view(-1, page_bytes)
            pages = {n: rows[i * len(part) :][: len(part)] for i, n in enumerate(names)}
            local = self._offsets(len(part))
            if to_guest:
                for name in names:
                    device.pack(name, part, pages[name], self._unit.heads(name))
            remote.exchange(part, memory_of(room), local, to_guest=to_guest, grace_s=grace_s)
            if not to_guest:
                for name in names:
                    device.unpack(name, part, pages[name], self._unit.heads(name))

        self._in_pieces(blocks, per_time, stop, copy)

    def _room(self, *, on_device: bool = False) -> tuple[int, torch.Tensor]:
        """Return a number of blocks and uint8 memory for their pages, kept for the next copies."""
        each_bytes = len(self._unit.names) * self._host.page_bytes
        per_time = max(1, _BOUNCE_BYTES // each_bytes)
        if self._bounce is None:
            device = self._host.device
            if device is None:
                self._bounce = torch.from_numpy(reserve(per_time * each_bytes).view())
            else:
                self._bounce = device.room(per_time * each_bytes, on_device=on_device)
        return per_time, self._bounce

    def _offsets(self, num_blocks: int) -> dict[str, PageOffsets]:
        """Return the offsets of pages in that memory: by attention, then by block."""
        names = self._unit.names
        pages = np.arange(num_blocks * len(names), dtype=np.int64) * self._host.page_bytes
        return dict(zip(names, np.split(pages, len(names)), strict=True))

    def _still_there(
        self, blocks: Sequence[int]
    ) -> contextlib.AbstractContextManager[Sequence[int]]:
        """Provide those blocks that the source holds: an older block written since is at home."""
        if self._source is None:
            return contextlib.nullcontext(blocks)
        return self._unit.holding(blocks)

    def _host_memory(self) -> tuple[Memory, dict[str, int]]:
        """Return one memory that spans the unit's slabs, and the offset of each slab in it.

        A submission names one memory, and each submission waits several times for the GIL, which
        the engine's thread holds. No offset points to the gaps between the slabs.
        """
        slabs = {name: self._host.memory(name) for name in self._unit.names}
        first = min(slab.address for slab in slabs.values())
        end = max(slab.address + slab.num_bytes for slab in slabs.values())
        whole = Memory(first, end - first, True, list(slabs.values()))
        return whole, {name: slab.address - first for name, slab in slabs.items()}

    def _between_guests(self, blocks: Sequence[int], stop: Callable[[], bool]) -> None:
        assert self._source is not None
        assert self._target is not None
        with self._still_there(blocks) as found:
            blocks = found  # a block that returns home meanwhile may be copied: it is never read
        on_device = all(
            isinstance(kv, StagedRemoteKv) and kv.is_on_gpu for kv in (self._source, self._target)
        )
        per_time, room = self._room(on_device=on_device)
        memory = memory_of(room)
        for first in range(0, len(blocks), per_time):
            if stop():
                return
            part = blocks[first : first + per_time]
            pages, size = self._offsets(len(part)), len(part) * self.each_bytes
            wait_all(self._source.copy(part, memory, pages, to_guest=False), size)
            wait_all(self._target.copy(part, memory, pages, to_guest=True), size)
            self.num_bytes += size
