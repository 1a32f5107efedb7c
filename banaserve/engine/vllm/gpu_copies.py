"""Copies between a KV cache on a GPU and the store's pool in host memory."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from banaserve.engine.vllm import compat
from banaserve.kvstore.pool import PoolView

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class QueuedCopy:
    """A copy on a stream, between two events.

    Attributes:
        pointers: Read while the copy runs, so they live as long as this.
    """

    began: torch.cuda.Event
    ended: torch.cuda.Event
    pointers: tuple[torch.Tensor, ...]

    def join(self) -> None:
        torch.cuda.current_stream().wait_event(self.ended)

    def finish(self) -> float:
        self.ended.synchronize()
        return self.began.elapsed_time(self.ended) / 1e3


class GpuCopier:
    """Queues copies on two streams, one a direction, so that loads and saves run side by side.

    No copy thread and no engine thread waits for a copy: the engine's stream waits for a layer's
    load, the save stream for a layer's computation.
    """

    is_synchronous = False

    def __init__(self, layers: Sequence[torch.Tensor], page_bytes: int, part: int) -> None:
        self._layers = list(layers)
        self._bases = np.asarray([tensor.data_ptr() for tensor in layers], dtype=np.int64)
        self._page_bytes = page_bytes
        self._part = part
        self._load_stream = torch.cuda.Stream(layers[0].device)
        self._save_stream = torch.cuda.Stream(layers[0].device)
        self._pinning = threading.Lock()
        self._pinned: PoolView | None = None
        self._copy = compat.batch_copier()

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def load(
        self,
        layer: int,
        view: PoolView,
        blocks: Sequence[int],
        slots: Sequence[int],
        after: torch.cuda.Event,
    ) -> QueuedCopy:
        host, device = self._host(layer, view, slots), self._device(layer, blocks)
        # Blocks may have belonged to a request whose last step still runs on the engine's stream.
        return self._queue(self._load_stream, after, view, host, device)

    def save(
        self,
        layer: int,
        view: PoolView,
        blocks: Sequence[int],
        slots: Sequence[int],
        after: torch.cuda.Event,
    ) -> QueuedCopy:
        host, device = self._host(layer, view, slots), self._device(layer, blocks)
        return self._queue(self._save_stream, after, view, device, host)

    def _queue(
        self,
        stream: torch.cuda.Stream,
        after: torch.cuda.Event,
        view: PoolView,
        source: torch.Tensor,
        target: torch.Tensor,
    ) -> QueuedCopy:
        self._pin(view)
        began = torch.cuda.Event(enable_timing=True)
        ended = torch.cuda.Event(enable_timing=True)
        stream.wait_event(after)
        began.record(stream)
        with torch.cuda.stream(stream):
            sizes = torch.full_like(source, self._page_bytes)
            self._copy(source, target, sizes)
        ended.record(stream)
        return QueuedCopy(began, ended, (source, target, sizes))

    def _host(self, layer: int, view: PoolView, slots: Sequence[int]) -> torch.Tensor:
        first = view.base_address + view.fingerprint.offset_bytes(layer, self._part)
        return torch.from_numpy(np.asarray(slots, dtype=np.int64) * view.slot_bytes + first)

    def _device(self, layer: int, blocks: Sequence[int]) -> torch.Tensor:
        offsets = np.asarray(blocks, dtype=np.int64) * self._page_bytes
        return torch.from_numpy(offsets + self._bases[layer])

    def _pin(self, view: PoolView) -> None:
        """Lock the pool's pages for this process's GPU: only then do copies run on their own."""
        with self._pinning:
            if self._pinned is view:
                return
            runtime = torch.cuda.cudart()
            if self._pinned is not None:
                runtime.cudaHostUnregister(self._pinned.base_address)
            code = int(runtime.cudaHostRegister(view.base_address, view.memory.size, 0))
            if code:
                logger.warning("the pool cannot be pinned (CUDA error %d): slower copies", code)
            self._pinned = view
