"""Copies of a GPU's worker, without a GPU: the device, pinned memory, and blocks in several runs.

CUDA's place is taken by an object that does at once what a stream would do later.
"""

from __future__ import annotations

import ctypes
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from banaserve.engine.connector.worker_side import gpu_block_copy
from banaserve.engine.connector.worker_side.block_copy import make_copier
from banaserve.engine.connector.worker_side.gpu_block_copy import GpuCopier
from banaserve.kernels import packed_pages
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.kvstore.pool import PoolView, SlotPool

LAYERS, BLOCKS, HEADS, TOKENS, CONTENT, SLOTS = 2, 9, 3, 16, 128, 8
PAGE_BYTES = HEADS * TOKENS * CONTENT * 4
FINGERPRINT = Fingerprint(
    model="m",
    dtype="float32",
    block_size_tokens=TOKENS,
    num_layers=LAYERS,
    num_kv_heads=HEADS,
    head_size=CONTENT // 2,
    layout="LHBNC",
    page_bytes=PAGE_BYTES,
)
OUT_OF_MEMORY, ALREADY = 2, 712


class Cuda:
    """Keeps a current device for each thread, and notes on which one something was called.

    Attributes:
        codes: What registering answers, one after the other; 0 when they are used up.
    """

    def __init__(self) -> None:
        self.calls: list[tuple[str, Any]] = []
        self.codes: list[int] = []
        self._here = threading.local()

    def note(self, name: str, what: Any = None) -> None:
        self.calls.append((name, getattr(self._here, "device", 0) if what is None else what))

    @contextmanager
    def device(self, device: Any) -> Iterator[None]:
        self._here.device = device
        yield
        del self._here.device

    @contextmanager
    def stream(self, stream: Any) -> Iterator[None]:
        yield

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=self._pin, cudaHostUnregister=self._unpin)

    def _pin(self, address: int, num_bytes: int, flags: int) -> int:
        self.note("pin")
        return self.codes.pop(0) if self.codes else 0

    def _unpin(self, address: int) -> int:
        self.note("unpin", address)
        return 0

    def Stream(self, device: Any) -> Any:
        wait = lambda: self.note("wait", "stream")  # noqa: E731
        return SimpleNamespace(cuda_stream=7, wait_event=lambda event: None, synchronize=wait)

    def Event(self, **_: Any) -> Any:
        return SimpleNamespace(record=lambda *stream: None)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Cuda:
    cuda = Cuda()
    monkeypatch.setattr(gpu_block_copy, "torch", SimpleNamespace(cuda=cuda))
    ones = lambda count, device: cuda.note("launch", "after an error")  # noqa: E731
    monkeypatch.setattr(gpu_block_copy, "torch", SimpleNamespace(cuda=cuda, ones=ones))

    def copy(targets: Any, sources: Any, num_bytes: int, stream: int) -> tuple[()]:
        cuda.note("copy")
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(target, source, num_bytes)
        return ()

    monkeypatch.setattr(gpu_block_copy, "choose_copies", lambda *_: copy)
    return cuda


@pytest.fixture
def views() -> Iterator[list[PoolView]]:
    pools = [SlotPool(SLOTS * FINGERPRINT.slot_bytes) for _ in range(2)]
    yield [PoolView(pool.fd, pool.num_bytes, i, FINGERPRINT) for i, pool in enumerate(pools)]
    for pool in pools:
        pool.close()


def caches(order: str, seed: int) -> list[torch.Tensor]:
    """``[block, head, token, content]`` of each layer, in one of vLLM's orders in memory."""
    sizes = {"L": LAYERS, "B": BLOCKS, "H": HEADS, "N": TOKENS, "C": CONTENT}
    draws = torch.Generator().manual_seed(seed)
    whole = torch.randn([sizes[axis] for axis in order], generator=draws)
    return list(whole.permute([order.index(axis) for axis in "LBHNC"]))


def on_device(layer: torch.Tensor, device: Any) -> Any:
    """A tensor that says it is elsewhere."""
    return SimpleNamespace(
        device=device,
        data_ptr=layer.data_ptr,
        shape=layer.shape,
        stride=layer.stride,
        element_size=layer.element_size,
    )


def test_a_copy_thread_works_on_the_workers_own_device(cuda: Cuda, views: list[PoolView]) -> None:
    layers = caches("LBHNC", 1)
    copier = make_copier(
        [on_device(layer, SimpleNamespace(type="cuda")) for layer in layers], PAGE_BYTES, 0
    )
    with ThreadPoolExecutor(1) as executor:
        for copy in (copier.load, copier.save):
            executor.submit(copy, 0, views[0], [0], [0], cuda.Event()).result()
    assert [name for name, _ in cuda.calls] == ["pin", "copy", "copy"]
    assert {getattr(device, "type", None) for _, device in cuda.calls} == {"cuda"}


@pytest.mark.parametrize("order", ["LBHNC", "LBNHC", "LHBNC", "BLHNC", "BLNHC", "BHLNC"])
def test_what_is_saved_is_loaded_in_every_order_of_vllm(
    order: str, cuda: Cuda, views: list[PoolView], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packed_pages, "STAGE_BYTES", 2 * PAGE_BYTES)  # five blocks in three pieces
    mine, others = caches(order, 1), caches(order, 2)
    before = [layer.clone() for layer in others]
    writer, reader = GpuCopier(mine, PAGE_BYTES, 0), GpuCopier(others, PAGE_BYTES, 0)
    blocks, slots, targets = [5, 0, 8, 7, 1], [7, 2, 3, 0, 5], [1, 2, 6, 4, 8]
    for layer in range(LAYERS):
        writer.save(layer, views[0], blocks, slots, writer.mark())
        reader.load(layer, views[0], targets, slots, reader.mark())
    rest = [block for block in range(BLOCKS) if block not in targets]
    for layer in range(LAYERS):
        assert torch.equal(others[layer][targets], mine[layer][blocks])
        assert torch.equal(others[layer][rest], before[layer][rest])
    assert {name for name, _ in cuda.calls} == {"pin", "copy"}
    if not order.endswith("NHC"):
        # The store's page: head by head, wherever the cache keeps its heads.
        first = 7 * views[0].slot_bytes + views[0].fingerprint.offset_bytes(1, 0)
        page = torch.from_numpy(views[0].memory[first : first + PAGE_BYTES]).view(torch.float32)
        assert torch.equal(page, mine[1][5].flatten())


def test_blocks_that_are_no_pages_are_refused(cuda: Cuda) -> None:
    with pytest.raises(ValueError, match=rf"^page_bytes: 8; allowed: {PAGE_BYTES}"):
        GpuCopier(caches("LHBNC", 1), 8, 0)
    with pytest.raises(ValueError, match=r"^page_bytes: 8; allowed"):
        GpuCopier(caches("LBHNC", 1), 8, 0)


def test_a_pool_that_is_known_is_pinned_before_the_first_step(
    cuda: Cuda, views: list[PoolView]
) -> None:
    copier = GpuCopier(caches("LBHNC", 1), PAGE_BYTES, 0, views[0])
    assert [name for name, _ in cuda.calls] == ["pin"]
    copier.load(0, views[0], [0], [0], copier.mark())
    assert [name for name, _ in cuda.calls] == ["pin", "copy"]


def test_a_new_pool_is_pinned_when_no_copy_touches_the_old_one(
    cuda: Cuda, views: list[PoolView]
) -> None:
    copier = GpuCopier(caches("LBHNC", 1), PAGE_BYTES, 0)
    for view in (views[0], views[0], views[1]):
        copier.load(0, view, [0], [0], copier.mark())
    copier.close()
    copier.close()
    expected = ["pin", "copy", "copy", "wait", "wait", "unpin", "pin", "copy", "wait", "wait"]
    assert [name for name, _ in cuda.calls] == [*expected, "unpin"]
    unpinned = [address for name, address in cuda.calls if name == "unpin"]
    assert unpinned == [view.base_address for view in views]


class NotingLock:
    """A lock whose event is set once a thread waits for it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_awaited = threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.is_awaited.set()
            self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()


def test_no_thread_unpins_the_pool_while_another_queues_copies(
    cuda: Cuda, views: list[PoolView], monkeypatch: pytest.MonkeyPatch
) -> None:
    lock = NotingLock()
    monkeypatch.setattr(gpu_block_copy, "threading", SimpleNamespace(Lock=lambda: lock))
    pool = gpu_block_copy.PinnedPool(torch.device("cpu"), lambda: None)

    def pin_the_next() -> None:
        with pool.pinned(views[1].memory):
            lock.is_awaited.set()

    with ThreadPoolExecutor(1) as executor, pool.pinned(views[0].memory):
        executor.submit(pin_the_next)
        assert lock.is_awaited.wait(60)
        assert [name for name, _ in cuda.calls] == ["pin"]
    assert [name for name, _ in cuda.calls] == ["pin", "unpin", "pin"]


def test_a_pool_that_cannot_be_pinned_is_copied_all_the_same(
    cuda: Cuda, views: list[PoolView], caplog: pytest.LogCaptureFixture
) -> None:
    cuda.codes = [OUT_OF_MEMORY]
    copier = GpuCopier(caches("LBHNC", 1), PAGE_BYTES, 0)
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            copier.load(0, views[0], [0], [0], copier.mark())
    copier.close()
    # The launch takes CUDA's error, which would else be reported as that of a later one.
    assert [name for name, _ in cuda.calls] == ["pin", "launch", "copy", "copy"]
    (told,) = (record.getMessage() for record in caplog.records)
    assert "cannot be pinned (CUDA error 2)" in told
    assert "ulimit -l" in told


def test_a_pool_that_another_has_pinned_is_left_to_it(cuda: Cuda, views: list[PoolView]) -> None:
    cuda.codes = [ALREADY]
    pool = gpu_block_copy.PinnedPool(torch.device("cpu"), lambda: None)
    with pool.pinned(views[0].memory) as is_pinned:
        assert is_pinned
    pool.release()
    assert [name for name, _ in cuda.calls] == ["pin", "launch"]


def test_without_cuda_in_the_build_copies_are_those_of_vllm(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kv_cache = pytest.importorskip("banaserve.engine.compat.kv_cache")
    monkeypatch.setattr(gpu_block_copy, "_native_cuda", None)
    copied: list[list[int]] = []

    def swap(*tensors: torch.Tensor) -> None:
        copied.extend(tensor.tolist() for tensor in tensors)

    monkeypatch.setattr(kv_cache, "batch_copier", lambda: swap)
    monkeypatch.setattr(torch.cuda, "ExternalStream", lambda _: None)
    copy = gpu_block_copy.choose_copies(PAGE_BYTES, False)
    copy(np.array([1, 2]), np.array([3, 4]), PAGE_BYTES, 0)
    assert copied == [[3, 4], [1, 2], [PAGE_BYTES] * 2]
