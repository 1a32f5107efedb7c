"""Which device the copies of a GPU's worker are queued on, without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from banaserve.engine.vllm import gpu_copies
from banaserve.engine.vllm.gpu_copies import GpuCopier


class Cuda:
    """Keeps a current device for each thread, and notes on which one something was called."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, int]] = []
        self._here = threading.local()

    def note(self, name: str) -> int:
        """Returns CUDA's word for success."""
        self.calls.append((name, getattr(self._here, "device", 0)))
        return 0

    @contextmanager
    def device(self, device: int) -> Iterator[None]:
        self._here.device = device
        yield
        del self._here.device

    def cudart(self) -> Any:
        return SimpleNamespace(cudaHostRegister=lambda *_: self.note("pin"))

    def Stream(self, device: int) -> Any:
        return SimpleNamespace(cuda_stream=7, wait_event=lambda event: None)

    def Event(self, **_: Any) -> Any:
        return SimpleNamespace(record=lambda stream: None)


def test_a_copy_thread_works_on_the_workers_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda()
    queued = lambda *_: cuda.note("copy") or ()  # noqa: E731
    monkeypatch.setattr(gpu_copies, "torch", SimpleNamespace(cuda=cuda))
    monkeypatch.setattr(gpu_copies, "choose_copies", lambda page_bytes, is_pinned: queued)
    layer: Any = SimpleNamespace(device=1, data_ptr=lambda: 4096)
    view: Any = SimpleNamespace(
        base_address=0,
        slot_bytes=64,
        memory=SimpleNamespace(size=64),
        fingerprint=SimpleNamespace(offset_bytes=lambda layer, part: 0),
    )
    copier = GpuCopier([layer], 64, 0)
    with ThreadPoolExecutor(1) as executor:
        for copy in (copier.load, copier.save):
            executor.submit(copy, 0, view, [0], [0], cuda.Event()).result()
    assert cuda.calls == [("pin", 1), ("copy", 1), ("copy", 1)]
