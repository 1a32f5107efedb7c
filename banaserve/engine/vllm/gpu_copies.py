"""Copies between a KV cache on a GPU and the store's pool in host memory."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

try:
    from banaserve import _native_cuda
except ImportError:  # built without BANASERVE_CUDA=1
    _native_cuda = None  # type: ignore[assignment]
from banaserve.engine.vllm.gpu_pages import Addresses, CopyPages, gpu_pages
from banaserve.engine.vllm.gpu_pinning import PinnedPool
from banaserve.errors import UserError
from banaserve.kvstore.pool import PoolView

logger = logging.getLogger(__name__)
QueueCopies = Callable[[Addresses, Addresses, int, int], tuple[torch.Tensor, ...]]
"""``(targets, sources, num_bytes, stream)``; returns what the copies still read while they run."""

MakeCopies = Callable[[], QueueCopies]

# By arithmetic, not measured: a copy engine begins a copy in about a microsecond, in which PCIe
# moves 16 KiB or more.
KERNEL_BELOW_BYTES = 16 * 1024


def choose_copies(page_bytes: int, is_pinned: bool, otherwise: MakeCopies | None) -> QueueCopies:
    """How pages of this size are copied between host and GPU.

    Args:
        otherwise: Makes the copies of a build without CUDA; None where there are none.

    Raises:
        UserError: This build is without CUDA, and there is nothing else to copy with.
    """
    if _native_cuda is None:
        if otherwise is None:
            raise UserError("this build of banaserve has no GPU copies: set BANASERVE_CUDA=1")
        return otherwise()
    # A kernel would fault on host memory that is not pinned.
    by_kernel = is_pinned and page_bytes < KERNEL_BELOW_BYTES
    queue = _native_cuda.copy_by_kernel if by_kernel else _native_cuda.copy_batch

    def copy(
        target: Addresses, source: Addresses, num_bytes: int, stream: int
    ) -> tuple[torch.Tensor, ...]:
        queue(target, source, num_bytes, stream)
        return ()

    return copy


@dataclass(frozen=True, slots=True)
class QueuedCopy:
    """A copy on a stream, between two events.

    Attributes:
        pointers: Perhaps read while the copy runs, so they live as long as this.
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

    Args:
        layers: One tensor a layer, of equal shape and strides, its first dimension the blocks.
        page_bytes: Of a block of one layer.
        part: This worker's part of a slot.
        otherwise: See ``choose_copies``.

    Raises:
        ValueError: See ``gpu_pages``.
        UserError: See ``choose_copies``.
    """

    is_synchronous = False

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        page_bytes: int,
        part: int,
        otherwise: MakeCopies | None = None,
    ) -> None:
        self._pages = gpu_pages(layers, page_bytes)
        self._page_bytes = page_bytes
        self._part = part
        self._gpu = layers[0].device
        self._load_stream = torch.cuda.Stream(self._gpu)
        self._save_stream = torch.cuda.Stream(self._gpu)
        self._pool = PinnedPool(self._gpu, self._wait_for_copies)
        self._pinned_copies = choose_copies(page_bytes, True, otherwise)
        self._other_copies = choose_copies(page_bytes, False, otherwise)
        logger.info("GPU copies by %s", "banaserve" if _native_cuda else "vLLM")

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
        # Blocks may have belonged to a request whose last step still runs on the engine's stream.
        host = self._host(layer, view, slots)
        work = functools.partial(self._pages.load, layer, blocks, host)
        return self._queue(self._load_stream, after, view, work)

    def save(
        self,
        layer: int,
        view: PoolView,
        blocks: Sequence[int],
        slots: Sequence[int],
        after: torch.cuda.Event,
    ) -> QueuedCopy:
        host = self._host(layer, view, slots)
        work = functools.partial(self._pages.save, layer, blocks, host)
        return self._queue(self._save_stream, after, view, work)

    def close(self) -> None:
        """Let go of the pool, once no copy touches it."""
        self._pool.release()

    def _queue(
        self,
        stream: torch.cuda.Stream,
        after: torch.cuda.Event,
        view: PoolView,
        work: Callable[[CopyPages], None],
    ) -> QueuedCopy:
        kept: list[torch.Tensor] = []
        # A thread that copies begins with the first device as its own, and this may be another.
        with torch.cuda.device(self._gpu), torch.cuda.stream(stream):
            queue = self._pinned_copies if self._pool.pin(view) else self._other_copies

            def copy(target: Addresses, source: Addresses) -> None:
                kept.extend(queue(target, source, self._page_bytes, stream.cuda_stream))

            began = torch.cuda.Event(enable_timing=True)
            ended = torch.cuda.Event(enable_timing=True)
            stream.wait_event(after)
            began.record(stream)
            work(copy)
            ended.record(stream)
        return QueuedCopy(began, ended, tuple(kept))

    def _host(self, layer: int, view: PoolView, slots: Sequence[int]) -> Addresses:
        first = view.base_address + view.fingerprint.offset_bytes(layer, self._part)
        return np.asarray(slots, dtype=np.int64) * view.slot_bytes + first

    def _wait_for_copies(self) -> None:
        self._load_stream.synchronize()
        self._save_stream.synchronize()
