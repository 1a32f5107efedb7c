"""Copies of whole blocks of a unit between the host and a guest, or from guest to guest."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from banaserve.engine.vllm.migration.kv.host_kv import DeviceKv, HostKv
from banaserve.engine.vllm.migration.kv.remote_kv import (
    BACKGROUND_GRACE_S,
    STEP_GRACE_S,
    RemoteKv,
    StagedRemoteKv,
    wait_all,
)
from banaserve.engine.vllm.migration.time_hook import REAL_TIME, TimeHook
from banaserve.transport.local_region import reserve
from banaserve.transport.memory import Memory

if TYPE_CHECKING:
    from banaserve.engine.vllm.migration.units.host_unit import (
        HostUnit,  # needs vLLM, copies do not
    )

_BOUNCE_BYTES = 8 << 20
_ROUND_BYTES = 64 << 20
"""Of one submission: what an abort may have to wait for."""


class BlockMover:
    """One direction of one unit: ``source`` and ``target`` are None for the host.

    Attributes:
        num_bytes: Bytes that all copies have copied, also one that is under way.
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
        self._bounce: Memory | None = None
        self._time_hook = time_hook

    def copy(
        self,
        blocks: Sequence[int],
        stop: Callable[[], bool] = lambda: False,
        *,
        in_background: bool = False,
    ) -> int:
        """Copy these blocks of every layer; blocks the caller, not the GIL.

        Args:
            stop: Asked between two submissions: whether to give up.
            in_background: Steps go on meanwhile. A guest that blocks go to from home may then stand
                still for longer; where they come from one, steps may wait for the same blocks.

        Returns:
            Bytes copied.

        Raises:
            GuestLostError: One of the guests is gone; the host's own KV may hold half a copy.
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
        """Blocks are packed into host memory before they leave, or unpacked when they have come."""
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
                memory = self._room(per_time * len(names) * page_bytes)
                used = memory.view()[: len(part) * len(names) * page_bytes]
                rows = torch.from_numpy(used).view(-1, page_bytes)
                pages = {n: rows[i * len(part) :][: len(part)] for i, n in enumerate(names)}
                offsets = np.arange(len(part) * len(names), dtype=np.int64) * page_bytes
                local = dict(zip(names, np.split(offsets, len(names)), strict=True))
                if to_guest:
                    for name in names:
                        device.pack(name, part, pages[name], self._unit.heads(name))
                remote.exchange(part, memory, local, to_guest=to_guest, grace_s=grace_s)
                if not to_guest:
                    for name in names:
                        device.unpack(name, part, pages[name], self._unit.heads(name))
                self.num_bytes += len(part) * self.each_bytes

    def _room(self, num_bytes: int) -> Memory:
        """Memory of this process, kept for the next time."""
        if self._bounce is None:
            device = self._host.device
            self._bounce = reserve(num_bytes) if device is None else device.room(num_bytes)
        return self._bounce

    def _still_there(
        self, blocks: Sequence[int]
    ) -> contextlib.AbstractContextManager[Sequence[int]]:
        """Blocks that the source has: an older block that is written meanwhile is at home."""
        if self._source is None:
            return contextlib.nullcontext(blocks)
        return self._unit.holding(blocks)

    def _host_memory(self) -> tuple[Memory, dict[str, int]]:
        """One memory over the unit's slabs, and where each begins in it.

        A submission names one memory, and each submission waits several times for the GIL, which
        the engine's thread has. What lies between the slabs is named by no offset.
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
            blocks = found  # what comes home meanwhile may be copied: nobody reads it
        per_time = max(1, _BOUNCE_BYTES // self._host.page_bytes)
        memory = self._room(per_time * self._host.page_bytes)
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
