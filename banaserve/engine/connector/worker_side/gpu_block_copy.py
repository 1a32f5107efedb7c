"""Copies between a KV cache on a GPU and the store's pool in host memory.

``GpuCopier`` queues them on one stream per direction. Blocks whose heads are not contiguous are
packed on the GPU first, so that each page crosses the bus as one run of bytes. ``PinnedPool`` pins
the pool for this process's GPU, so that copies are asynchronous.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from banaserve.kernels.packed_pages import PackedPages, is_one_run
from banaserve.kvstore.sizes import format_size

try:
    from banaserve import _native_cuda
except ImportError:  # built without BANASERVE_CUDA=1
    _native_cuda = None  # type: ignore[assignment]
from banaserve.kvstore.pool import Numbers, PoolView

Addresses = npt.NDArray[np.int64]
CopyPages = Callable[[Addresses, Addresses], None]
"""Function ``(targets, sources)`` that queues the copy of one page for each pair."""
logger = logging.getLogger(__name__)
_ALREADY_REGISTERED = 712
"""cudaErrorHostMemoryAlreadyRegistered."""
QueueCopies = Callable[[Addresses, Addresses, int, int], tuple[torch.Tensor, ...]]
"""Function ``(targets, sources, num_bytes, stream)`` that queues copies; returns what they read."""
# By arithmetic, not measured: a copy engine starts a copy in about a microsecond, in which PCIe
# moves 16 KiB or more.
KERNEL_BELOW_BYTES = 16 * 1024


def gpu_pages(layers: Sequence[torch.Tensor], page_bytes: int) -> _WholeBlocks | _PackedBlocks:
    """Make the pages of layers of equal shape and strides, whose first dimension is the blocks.

    They queue the copies of one layer's blocks on the current stream: loads on one stream, saves on
    another, each by one thread at a time.

    Raises:
        ValueError: A block does not have ``page_bytes`` bytes, or consists of several runs that are
            not the heads of vLLM's layouts.
    """
    block_bytes = layers[0].shape[1:].numel() * layers[0].element_size()
    if page_bytes != block_bytes:
        raise ValueError(f"page_bytes: {page_bytes}; allowed: {block_bytes}, as a block has")
    return _WholeBlocks(layers) if is_one_run(layers[0]) else _PackedBlocks(PackedPages(layers))


class _WholeBlocks:
    """Pages of layers in which each block is one run of bytes."""

    def __init__(self, layers: Sequence[torch.Tensor]) -> None:
        self._layers = list(layers)  # their memory has to outlive the addresses
        self._bases = [tensor.data_ptr() for tensor in layers]
        self._block_bytes = layers[0].stride()[0] * layers[0].element_size()

    def load(self, layer: int, blocks: Numbers, host: Addresses, copy: CopyPages) -> None:
        copy(self._addresses(layer, blocks), host)

    def save(self, layer: int, blocks: Numbers, host: Addresses, copy: CopyPages) -> None:
        copy(host, self._addresses(layer, blocks))

    def _addresses(self, layer: int, blocks: Numbers) -> Addresses:
        return np.asarray(blocks, dtype=np.int64) * self._block_bytes + self._bases[layer]


class _PackedBlocks:
    """Pages of layers whose blocks are packed on the GPU, since their heads are not contiguous.

    Each page then crosses the bus as one run. The work of one stream runs in order, so each piece
    finds the stage free.
    """

    def __init__(self, packed: PackedPages) -> None:
        self._packed = packed
        self._load_stage, self._save_stage = packed.stage(), packed.stage()

    def load(self, layer: int, blocks: Numbers, host: Addresses, copy: CopyPages) -> None:
        for part, room in self._pieces(len(blocks), self._load_stage):
            copy(room, host[part])
            self._packed.unpack(layer, list(blocks[part]), self._load_stage)

    def save(self, layer: int, blocks: Numbers, host: Addresses, copy: CopyPages) -> None:
        for part, room in self._pieces(len(blocks), self._save_stage):
            self._packed.pack(layer, list(blocks[part]), self._save_stage)
            copy(host[part], room)

    def _pieces(self, count: int, stage: torch.Tensor) -> Iterator[tuple[slice, Addresses]]:
        """Yield slices of at most as many blocks as the stage has pages, with those addresses."""
        num_pages, page_bytes = stage.shape
        pages = np.arange(num_pages, dtype=np.int64) * page_bytes + stage.data_ptr()
        for first in range(0, count, num_pages):
            part = slice(first, min(first + num_pages, count))
            yield part, pages[: part.stop - part.start]


class PinnedPool:
    """Pinning of one view of shared memory at a time; may be called from several threads.

    Pages must not be unmapped while they are registered: CUDA would go on using them for whatever
    is mapped there next. So the view is kept until ``release``.

    Args:
        wait_for_copies: Function that returns when no copy queued earlier uses the pool any more.
    """

    def __init__(self, gpu: torch.device, wait_for_copies: Callable[[], None]) -> None:
        self._gpu = gpu
        self._wait_for_copies = wait_for_copies
        self._lock = threading.Lock()
        self._view: npt.NDArray[Any] | None = None
        self._is_ours = self._is_pinned = False

    @contextlib.contextmanager
    def pinned(self, view: npt.NDArray[Any]) -> Iterator[bool]:
        """Pin ``view`` and yield whether it is pinned; release the previous view first.

        Within the context no other thread releases the view: a copy that is queued there is one
        that ``release`` waits for. The failure to pin a view is logged once, and pinning it is not
        tried again.
        """
        with self._lock:
            if self._view is not view:
                self._release()
                self._view = view
                self._register(view)
            yield self._is_pinned

    def pin(self, view: npt.NDArray[Any]) -> None:
        """Pin ``view`` now, for copies that are queued later."""
        with self.pinned(view):
            pass

    def release(self) -> None:
        """Release the view once no copy uses it."""
        with self._lock:
            self._release()

    def _register(self, view: npt.NDArray[Any]) -> None:
        runtime = torch.cuda.cudart()
        code = int(runtime.cudaHostRegister(view.ctypes.data, view.nbytes, 0))
        self._is_ours = not code
        self._is_pinned = code in (0, _ALREADY_REGISTERED)
        if code:
            self._take_error()
        if not self._is_pinned:
            logger.warning(
                "%s of shared memory cannot be pinned (CUDA error %d), so copies are slower: look "
                "at ulimit -l, or make the store's pool smaller",
                format_size(view.nbytes),
                code,
            )

    def _release(self) -> None:
        if self._view is not None and self._is_ours:
            self._wait_for_copies()
            code = int(torch.cuda.cudart().cudaHostUnregister(self._view.ctypes.data))
            if code:
                self._take_error()
                logger.warning("shared memory cannot be unpinned (CUDA error %d)", code)
        self._view, self._is_ours, self._is_pinned = None, False, False

    def _take_error(self) -> None:
        """Consume the last CUDA error, which this thread's next launch would report again."""
        with contextlib.suppress(RuntimeError):
            torch.ones(1, device=self._gpu)


def choose_copies(page_bytes: int, is_pinned: bool) -> QueueCopies:
    """Choose the function that copies pages of this size between host and GPU.

    In a build without CUDA, it is vLLM's batch copy.
    """
    if _native_cuda is None:
        return _copies_of_vllm()
    # A kernel would fault on host memory that is not pinned.
    by_kernel = is_pinned and page_bytes < KERNEL_BELOW_BYTES
    queue = _native_cuda.copy_by_kernel if by_kernel else _native_cuda.copy_batch

    def copy(
        target: Addresses, source: Addresses, num_bytes: int, stream: int
    ) -> tuple[torch.Tensor, ...]:
        queue(target, source, num_bytes, stream)
        return ()

    return copy


def _copies_of_vllm() -> QueueCopies:
    from banaserve.engine.compat.kv_cache import batch_copier

    swap = batch_copier()

    def copy(
        target: Addresses, source: Addresses, num_bytes: int, stream: int
    ) -> tuple[torch.Tensor, ...]:
        pointers = torch.from_numpy(source), torch.from_numpy(target)
        sizes = torch.full_like(pointers[0], num_bytes)
        with torch.cuda.stream(torch.cuda.ExternalStream(stream)):
            swap(*pointers, sizes)
        return (*pointers, sizes)

    return copy


@dataclass(frozen=True, slots=True)
class QueuedCopy:
    """A copy on a stream, between two events.

    Attributes:
        pointers: Tensors that the copy may read while it runs, kept alive for that.
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
    """Copier with two streams, one per direction; arguments are those of ``make_copier``.

    No copy thread and no engine thread waits for a copy: the engine's stream waits for a layer's
    load, the save stream for a layer's computation.

    Raises:
        ValueError: See ``gpu_pages``.
    """

    is_synchronous = False

    def __init__(
        self,
        layers: Sequence[torch.Tensor],
        page_bytes: int,
        part: int,
        view: PoolView | None = None,
    ) -> None:
        self._pages = gpu_pages(layers, page_bytes)
        self._page_bytes = page_bytes
        self._in_layer = part * page_bytes
        self._gpu = layers[0].device
        self._load_stream = torch.cuda.Stream(self._gpu)
        self._save_stream = torch.cuda.Stream(self._gpu)
        self._pool = PinnedPool(self._gpu, self._wait_for_copies)
        self._pinned_copies = choose_copies(page_bytes, True)
        self._other_copies = choose_copies(page_bytes, False)
        logger.info("GPU copies by %s", "banaserve" if _native_cuda else "vLLM")
        if view is not None:
            with torch.cuda.device(self._gpu):
                self._pool.pin(view.memory)

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record()
        return event

    def load(
        self,
        layer: int,
        view: PoolView,
        blocks: Numbers,
        slots: Numbers,
        after: torch.cuda.Event,
    ) -> QueuedCopy:
        # The blocks may belong to a request whose last step still runs on the engine's stream.
        host = self._host(layer, view, slots)
        work = functools.partial(self._pages.load, layer, blocks, host)
        return self._queue(self._load_stream, after, view, work)

    def save(
        self,
        layer: int,
        view: PoolView,
        blocks: Numbers,
        slots: Numbers,
        after: torch.cuda.Event,
    ) -> QueuedCopy:
        host = self._host(layer, view, slots)
        work = functools.partial(self._pages.save, layer, blocks, host)
        return self._queue(self._save_stream, after, view, work)

    def close(self) -> None:
        """Release the pool once no copy uses it."""
        self._pool.release()

    def _queue(
        self,
        stream: torch.cuda.Stream,
        after: torch.cuda.Event,
        view: PoolView,
        work: Callable[[CopyPages], None],
    ) -> QueuedCopy:
        kept: list[torch.Tensor] = []
        # A copy thread starts with device 0 as its current device; this GPU may be another.
        with (
            torch.cuda.device(self._gpu),
            torch.cuda.stream(stream),
            self._pool.pinned(view.memory) as is_pinned,
        ):
            queue = self._pinned_copies if is_pinned else self._other_copies

            def copy(target: Addresses, source: Addresses) -> None:
                kept.extend(queue(target, source, self._page_bytes, stream.cuda_stream))

            began = torch.cuda.Event(enable_timing=True)
            ended = torch.cuda.Event(enable_timing=True)
            stream.wait_event(after)
            began.record(stream)
            work(copy)
            ended.record(stream)
        return QueuedCopy(began, ended, tuple(kept))

    def _host(self, layer: int, view: PoolView, slots: Numbers) -> Addresses:
        first = view.base_address + view.fingerprint.offset_bytes(layer) + self._in_layer
        return np.asarray(slots, dtype=np.int64) * view.slot_bytes + first

    def _wait_for_copies(self) -> None:
        self._load_stream.synchronize()
        self._save_stream.synchronize()
