"""Copies of whole blocks of a unit between the host and a guest, or from guest to guest."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from banaserve.migration.kv.host_kv import DeviceKv, HostKv
from banaserve.migration.kv.remote_kv import (
    BACKGROUND_GRACE_S,
    STEP_GRACE_S,
    RemoteKv,
    StagedRemoteKv,
    wait_all,
)
from banaserve.migration.rpc.tensors import memory_of
from banaserve.migration.time_hook import REAL_TIME, TimeHook
from banaserve.transport.memory import Memory
from banaserve.transport.regions.offered_region import reserve

if TYPE_CHECKING:
    from banaserve.migration.units.host_unit import (
        HostUnit,  # needs vLLM, copies do not
    )

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
        self._block_bytes = {
            name: sum(run.num_bytes for run in host.runs(unit.heads(name))) for name in unit.names
        }
        self.num_bytes = 0
        self.each_bytes = sum(self._block_bytes.values())
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
        each_bytes = self.each_bytes
        is_guarded = self._source is not None and self._unit.blocks_come_home
        per_time = max(1, (_BOUNCE_BYTES if is_guarded else _ROUND_BYTES) // each_bytes)
        for first in range(0, len(blocks), per_time):
            if stop():
                break
            with self._still_there(blocks[first : first + per_time]) as part:
                if not part:
                    continue
                tickets = remote.copy_units(
                    part, local, starts, self._host.page_bytes, to_guest=to_guest
                )
                wait_all(tickets, len(part) * each_bytes, grace_s)
                self.num_bytes += len(part) * each_bytes

    def _with_device(
        self, device: DeviceKv, blocks: Sequence[int], stop: Callable[[], bool], grace_s: float
    ) -> None:
        """Copy from or to a device: pack blocks into pages before, or unpack them after."""
        remote, to_guest = self._target or self._source, self._target is not None
        assert isinstance(remote, StagedRemoteKv)
        names, page_bytes = self._unit.names, self._host.page_bytes
        per_time = max(1, _BOUNCE_BYTES // (len(names) * page_bytes))
        for first in range(0, len(blocks), per_time):
            if stop():
                break
            with self._still_there(blocks[first : first + per_time]) as part:
                if not part:
                    continue
                room = self._room(per_time * len(names) * page_bytes, on_device=remote.is_on_gpu)
                rows = room[: len(part) * len(names) * page_bytes].view(-1, page_bytes)
                pages = {n: rows[i * len(part) :][: len(part)] for i, n in enumerate(names)}
                offsets = np.arange(len(part) * len(names), dtype=np.int64) * page_bytes
                local = dict(zip(names, np.split(offsets, len(names)), strict=True))
                if to_guest:
                    for name in names:
                        device.pack(name, part, pages[name], self._unit.heads(name))
                remote.exchange(part, memory_of(room), local, to_guest=to_guest, grace_s=grace_s)
                if not to_guest:
                    for name in names:
                        device.unpack(name, part, pages[name], self._unit.heads(name))
                self.num_bytes += len(part) * self.each_bytes

    def _room(self, num_bytes: int, *, on_device: bool = False) -> torch.Tensor:
        """Return memory, ``[num_bytes]`` uint8, which is kept for the next copies."""
        if self._bounce is None:
            device = self._host.device
            if device is None:
                self._bounce = torch.from_numpy(reserve(num_bytes).view())
            else:
                self._bounce = device.room(num_bytes, on_device=on_device)
        return self._bounce

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
        per_time = max(1, _BOUNCE_BYTES // self._host.page_bytes)
        on_device = all(
            isinstance(kv, StagedRemoteKv) and kv.is_on_gpu for kv in (self._source, self._target)
        )
        memory = memory_of(self._room(per_time * self._host.page_bytes, on_device=on_device))
        for name in self._unit.names:
            for first in range(0, len(blocks), per_time):
                if stop():
                    return
                part = blocks[first : first + per_time]
                offsets = np.arange(len(part), dtype=np.int64) * self._host.page_bytes
                size = len(part) * self._block_bytes[name]
                wait_all(self._source.copy(name, part, memory, offsets, to_guest=False), size)
                wait_all(self._target.copy(name, part, memory, offsets, to_guest=True), size)
                self.num_bytes += size
