"""Store copies of layers and heads that have moved: they go to the guest or host with the KV.

The free functions call the connector's hooks around attention, for layers whose attention runs
in a guest.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from banaserve.base.errors import GuestLostError
from banaserve.engine.compat.kv_connector import get_kv_transfer_group, has_kv_transfer_group
from banaserve.engine.connector.worker_side.block_copy import BlockCopier, Copy, EndedCopy
from banaserve.engine.connector.worker_side.worker import StoreConnectorWorker
from banaserve.kvstore.pool import Numbers, PoolView
from banaserve.migration.kv.dirty_blocks import DirtyBlockTracker, RemoteBlocks
from banaserve.migration.kv.host_kv import HostKv, KvRun
from banaserve.migration.kv.remote_kv import RemoteKv, wait_all
from banaserve.migration.rpc.messages import SlotCopies
from banaserve.transport.memory import Memory
from banaserve.transport.regions.remote_region import Ticket

_NOTHING = torch.empty(0)
WhereIs = Callable[[str], Sequence[tuple[KvRun, RemoteKv | None]]]
"""The runs of an attention's page, each with the KV of the guest that holds it; None: the host."""
OlderBlocks = Callable[[str], tuple[RemoteBlocks, RemoteKv] | None]
"""The blocks of an attention that are in a guest, with its KV; None if not split by blocks."""


def _connector() -> Any | None:
    if not has_kv_transfer_group():
        return None
    connector = get_kv_transfer_group()
    return connector if connector.has_connector_metadata() else None


def store_worker() -> StoreConnectorWorker | None:
    """Return the worker's side of the store's connector; None with another connector or none."""
    found = getattr(get_kv_transfer_group(), "worker", None) if has_kv_transfer_group() else None
    return found if isinstance(found, StoreConnectorWorker) else None


def wait_for_loads(names: Iterable[str]) -> None:
    """Wait until the blocks that these layers read have been fetched."""
    connector = _connector()
    if connector is not None:
        for name in names:
            connector.wait_for_layer_load(name)


def save_layers(names: Iterable[str], metadata: Any) -> None:
    """Tell the connector that these layers' blocks of this step may be saved."""
    connector = _connector()
    if connector is not None:
        for name in names:
            of_layer = metadata[name] if isinstance(metadata, dict) else metadata
            connector.save_kv_layer(name, _NOTHING, of_layer)


def slots_to_fill() -> SlotCopies | None:
    """Return the slots of this step's saves for a guest to fill; None if it is to fill none."""
    connector = _connector()
    if connector is None:
        return None
    found = connector.worker.slots_to_fill()
    if found.view is None:
        return None
    blocks = tuple(copy.block_id for copy in found.copies)
    slots = tuple(copy.slot.index for copy in found.copies)
    return SlotCopies(found.view.generation, blocks, slots)


def saved_elsewhere(names: Sequence[str], seconds: float) -> None:
    """Tell the connector that a guest saved these layers' blocks of this step, in ``seconds``."""
    connector = _connector()
    if connector is not None:
        connector.worker.saved_elsewhere(names, seconds)


def hold_saves(hold: bool) -> None:
    """Set whether to hold back saves at the end of attention: more tokens of the step follow."""
    if has_kv_transfer_group():
        get_kv_transfer_group().holds_saves = hold


def abandon_step() -> None:
    """Keep everything that this step computes out of the store."""
    if (worker := store_worker()) is not None:
        worker.abandon_step()


class StoreCopier:
    """A wrapper of the connector's copier, which still copies all local blocks.

    Args:
        names: Names of the attentions, indexed by the connector's layer numbers.
        part: Index of this worker's part of a slot.
        on_lost: Called from a copy thread when a guest is lost.
    """

    def __init__(
        self,
        inner: BlockCopier,
        names: Sequence[str],
        host: HostKv,
        dirty_blocks: DirtyBlockTracker,
        where_is: WhereIs,
        older_blocks: OlderBlocks,
        part: int,
        on_lost: Callable[[GuestLostError], None],
    ) -> None:
        self._inner = inner
        self._names = list(names)
        self._host = host
        self._dirty_blocks = dirty_blocks
        self._where_is = where_is
        self._older_blocks = older_blocks
        self._part = part
        self._on_lost = on_lost
        self.is_synchronous = inner.is_synchronous

    def mark(self) -> Any:
        return self._inner.mark()

    def load(self, layer: int, view: PoolView, blocks: Numbers, slots: Numbers, after: Any) -> Copy:
        # A fetched block is written as much as a computed one: a move has to copy it again.
        self._dirty_blocks.mark_loaded(blocks)
        parts = self._where_is(self._names[layer])
        if all(kv is None for _, kv in parts):
            return self._inner.load(layer, view, blocks, slots, after)
        return self._copy(layer, view, _plain(blocks), slots, parts, saves=False)

    def save(self, layer: int, view: PoolView, blocks: Numbers, slots: Numbers, after: Any) -> Copy:
        parts = self._where_is(self._names[layer])
        older = self._older_blocks(self._names[layer])
        if older is not None and (away := older[0].among(np.asarray(blocks, np.int64))).any():
            return self._save_both(layer, view, blocks, slots, away, older[1])
        if all(kv is None for _, kv in parts):
            return self._inner.save(layer, view, blocks, slots, after)
        return self._copy(layer, view, _plain(blocks), slots, parts, saves=True)

    def close(self) -> None:
        self._inner.close()

    def _save_both(
        self,
        layer: int,
        view: PoolView,
        blocks: Numbers,
        slots: Numbers,
        away: npt.NDArray[np.bool_],
        guest: RemoteKv,
    ) -> EndedCopy:
        """Save blocks of a layer, some of them in a guest; none of them is written meanwhile."""
        seconds = 0.0
        page = KvRun(0, self._host.page_bytes)
        for held_by, chosen in ((guest, away), (None, ~away)):
            mine = np.asarray(blocks, np.int64)[chosen].tolist()
            theirs = np.asarray(slots, np.int64)[chosen]
            if mine:
                parts = [(page, held_by)]
                seconds += self._copy(layer, view, mine, theirs, parts, saves=True).seconds
        return EndedCopy(seconds)

    def _copy(
        self,
        layer: int,
        view: PoolView,
        blocks: Sequence[int],
        slots: Numbers,
        parts: Sequence[tuple[KvRun, RemoteKv | None]],
        *,
        saves: bool,
    ) -> EndedCopy:
        began_s = time.perf_counter()
        name = self._names[layer]
        pool = Memory(view.base_address, view.memory.size, True, view)
        in_slot = view.fingerprint.offset_bytes(layer) + self._part * self._host.page_bytes
        pages = np.asarray(slots, np.int64) * view.slot_bytes + in_slot
        try:
            tickets: list[Ticket] = []
            for kv in {id(kv): kv for _, kv in parts if kv is not None}.values():
                tickets += kv.copy(blocks, pool, {name: pages}, to_guest=not saves, urgent=True)
            for run, held_by in parts:
                if held_by is None:
                    self._host.copy_run(name, run, blocks, pool, pages + run.in_page, saves=saves)
            wait_all(tickets, len(blocks) * self._host.page_bytes)
        except GuestLostError as lost:
            self._on_lost(lost)
        return EndedCopy(time.perf_counter() - began_s)


def _plain(blocks: Numbers) -> list[int]:
    """Return the numbers as a list of plain integers, which a message to a guest can carry."""
    numbers: list[int] = np.asarray(blocks, np.int64).tolist()
    return numbers
