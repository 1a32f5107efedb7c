"""Speed of the CUDA part of csrc on a GPU: copies to and from pinned memory, and slabs."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from types import ModuleType

import numpy as np
import torch

from banaserve.base.errors import UserError

PAGE_BYTES = (4 << 10, 16 << 10, 64 << 10, 1 << 20)
_TOTAL_BYTES = 64 << 20
_SLAB_BYTES = 256 << 20
Samples = dict[str, list[float]]


def native_or_reason() -> tuple[ModuleType | None, str]:
    """Return ``banaserve._native_cuda``, or None and the reason why it is missing."""
    try:
        from banaserve import _native_cuda
    except ImportError:
        return None, "GPU copies and slabs: not measured, built without BANASERVE_CUDA=1"
    return _native_cuda, ""


def measure_native(native: ModuleType, device: torch.device, runs: int, samples: Samples) -> None:
    """Measure scattered pages against one copy of as many bytes, and the mapping of slabs.

    Raises:
        UserError: A copy moved wrong bytes.
    """
    bench = _Copies(native, device)
    for run in range(-1, runs):  # the first run warms up
        found = {**bench.run(), **_slab_times(native, device)}
        if run >= 0:
            for name, value in found.items():
                samples[name].append(value)


class _Copies:
    """Pages in pinned memory and on the device, in a different order on either side."""

    def __init__(self, native: ModuleType, device: torch.device) -> None:
        self._ways = {"batch": native.copy_batch, "kernel": native.copy_by_kernel}
        self._stream = torch.cuda.Stream(device)
        self._host = torch.randint(0, 256, (_TOTAL_BYTES,), dtype=torch.uint8).pin_memory()
        self._device = torch.zeros(_TOTAL_BYTES, dtype=torch.uint8, device=device)
        self._draws = np.random.default_rng(0)

    def run(self) -> dict[str, float]:
        """Return fractions of a plain copy's speed, in both directions and for each page size."""
        found = {}
        for direction in ("to_gpu", "from_gpu"):
            to, of = self._ends(direction)
            plain_s = self._seconds(functools.partial(to.copy_, of, non_blocking=True))
            found[f"{direction}_plain_gb_per_s"] = _TOTAL_BYTES / plain_s / 1e9
            for page_bytes in PAGE_BYTES:
                for way, copy in self._ways.items():
                    taken_s = self._one(copy, to, of, page_bytes)
                    name = f"{direction}_{way}_{page_bytes >> 10}kib_copy_fraction"
                    found[name] = plain_s / taken_s
        return found

    def _ends(self, direction: str) -> tuple[torch.Tensor, torch.Tensor]:
        ends = (self._device, self._host)
        return ends if direction == "to_gpu" else ends[::-1]

    def _one(
        self, copy: Callable[..., None], to: torch.Tensor, of: torch.Tensor, page_bytes: int
    ) -> float:
        num_pages = _TOTAL_BYTES // page_bytes
        orders = [self._draws.permutation(num_pages) for _ in range(2)]
        to.zero_()
        torch.cuda.synchronize()
        places = [
            order * page_bytes + memory.data_ptr()
            for order, memory in zip(orders, (to, of), strict=True)
        ]
        seconds = self._seconds(lambda: copy(*places, page_bytes, self._stream.cuda_stream))
        pages = [memory.view(num_pages, page_bytes).cpu() for memory in (to, of)]
        if not torch.equal(pages[0][orders[0]], pages[1][orders[1]]):
            raise UserError(f"a copy of {page_bytes} bytes moved other bytes")
        return seconds

    def _seconds(self, work: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        with torch.cuda.stream(self._stream):
            begin.record()
            work()
            end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3


def _slab_times(native: ModuleType, device: torch.device) -> dict[str, float]:
    """Return milliseconds to map 256 MiB, to add one granule, and to unmap all of it."""
    slab = native.GpuSlab(2 * _SLAB_BYTES, device.index or 0)
    torch.cuda.synchronize(device)
    marks = [time.perf_counter()]
    slab.map(0, _SLAB_BYTES)
    marks.append(time.perf_counter())
    slab.map(_SLAB_BYTES, slab.granule_bytes)
    marks.append(time.perf_counter())
    slab.unmap(0, slab.num_bytes)
    marks.append(time.perf_counter())
    names = ("slab_map_256mib_ms", "slab_grow_ms", "slab_unmap_ms")
    return {
        name: 1e3 * (end - begin) for name, begin, end in zip(names, marks, marks[1:], strict=False)
    }
