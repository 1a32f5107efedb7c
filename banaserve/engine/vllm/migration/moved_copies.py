"""The store's copies of layers and heads that have moved: they go to where the KV lies."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from banaserve.engine.vllm.copies import BlockCopier, Copy, EndedCopy
from banaserve.engine.vllm.migration.away_blocks import AwayBlocks
from banaserve.engine.vllm.migration.host_kv import HostKv, Run
from banaserve.engine.vllm.migration.remote_kv import RemoteKv, wait_all
from banaserve.engine.vllm.migration.written_blocks import WrittenBlocks
from banaserve.errors import GuestLostError
from banaserve.kvstore.pool import PoolView
from banaserve.transport.interface import Ticket
from banaserve.transport.memory import Memory

WhereIs = Callable[[str], Sequence[tuple[Run, RemoteKv | None]]]
"""The runs of an attention's page, each with the guest that holds it; None: the host."""
OlderBlocks = Callable[[str], tuple[AwayBlocks, RemoteKv] | None]
"""Which blocks of an attention are in a guest, where the others are not."""


class MovedCopier:
    """Stands before the connector's copier; what is wholly at home goes on to that.

    Args:
        names: Of the attentions, by the layer numbers of the connector.
        part: This worker's part of a slot.
        on_lost: Told from a copy thread that a guest is lost.
    """

    def __init__(
        self,
        inner: BlockCopier,
        names: Sequence[str],
        host: HostKv,
        written: WrittenBlocks,
        where_is: WhereIs,
        older_blocks: OlderBlocks,
        part: int,
        on_lost: Callable[[GuestLostError], None],
    ) -> None:
        self._inner = inner
        self._names = list(names)
        self._host = host
        self._written = written
        self._where_is = where_is
        self._older_blocks = older_blocks
        self._part = part
        self._on_lost = on_lost
        self.is_synchronous = inner.is_synchronous

    def mark(self) -> Any:
        return self._inner.mark()

    def load(
        self, layer: int, view: PoolView, blocks: Sequence[int], slots: Sequence[int], after: Any
    ) -> Copy:
        # A fetched block is written as much as a computed one: a move has to copy it again.
        self._written.mark_loaded(blocks)
        parts = self._where_is(self._names[layer])
        if all(kv is None for _, kv in parts):
            return self._inner.load(layer, view, blocks, slots, after)
        return self._copy(layer, view, blocks, slots, parts, saves=False)

    def save(
        self, layer: int, view: PoolView, blocks: Sequence[int], slots: Sequence[int], after: Any
    ) -> Copy:
        parts = self._where_is(self._names[layer])
        older = self._older_blocks(self._names[layer])
        if older is not None and (away := older[0].among(np.asarray(blocks, np.int64))).any():
            return self._save_both(layer, view, blocks, slots, away, older[1])
        if all(kv is None for _, kv in parts):
            return self._inner.save(layer, view, blocks, slots, after)
        return self._copy(layer, view, blocks, slots, parts, saves=True)

    def close(self) -> None:
        self._inner.close()

    def _save_both(
        self,
        layer: int,
        view: PoolView,
        blocks: Sequence[int],
        slots: Sequence[int],
        away: npt.NDArray[np.bool_],
        guest: RemoteKv,
    ) -> EndedCopy:
        """Blocks of a layer of which some are in a guest; none of them is written meanwhile."""
        seconds = 0.0
        page = Run(0, self._host.page_bytes)
        for held_by, chosen in ((guest, away), (None, ~away)):
            mine = np.asarray(blocks, np.int64)[chosen].tolist()
            theirs = np.asarray(slots, np.int64)[chosen].tolist()
            if mine:
                parts = [(page, held_by)]
                seconds += self._copy(layer, view, mine, theirs, parts, saves=True).seconds
        return EndedCopy(seconds)

    def _copy(
        self,
        layer: int,
        view: PoolView,
        blocks: Sequence[int],
        slots: Sequence[int],
        parts: Sequence[tuple[Run, RemoteKv | None]],
        *,
        saves: bool,
    ) -> EndedCopy:
        began_s = time.perf_counter()
        name = self._names[layer]
        pool = Memory(view.base_address, view.memory.size, True, view)
        in_slot = view.fingerprint.offset_bytes(layer, self._part)
        pages = np.asarray(slots, np.int64) * view.slot_bytes + in_slot
        try:
            tickets: list[Ticket] = []
            for kv in {id(kv): kv for _, kv in parts if kv is not None}.values():
                tickets += kv.copy(name, blocks, pool, pages, to_guest=not saves, urgent=True)
            for run, held_by in parts:
                if held_by is None:
                    self._host.copy_run(name, run, blocks, pool, pages + run.in_page, saves=saves)
            wait_all(tickets, len(blocks) * self._host.page_bytes)
        except GuestLostError as lost:
            self._on_lost(lost)
        return EndedCopy(time.perf_counter() - began_s)
