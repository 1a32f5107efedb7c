"""Three-stage layer pipeline on a GPU's real streams, compared with equation 13.

The pipeline stands for a model: each layer waits for its fetch, multiplies matrices for about a set
time, and is saved; the copies are those of the store's connector, between a KV cache on the GPU and
a pool in host memory.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import median

import numpy as np
import torch

from banaserve.engine.connector.worker_side.gpu_block_copy import GpuCopier, QueuedCopy
from banaserve.kvstore.fingerprint import Fingerprint
from banaserve.kvstore.pool import PoolView, SlotPool
from benchmarks.drivers.layer_pipeline import hidden_fraction, pipeline

Samples = dict[str, list[float]]
COMPUTE_OVER_FETCH = (0.5, 1.0, 2.0)
_LAYERS, _BLOCKS, _HEADS, _TOKENS, _HEAD_SIZE = 16, 128, 8, 16, 128
_PAGE_BYTES = _HEADS * _TOKENS * 2 * _HEAD_SIZE * 2
_SIDE = 2048


def measure_pipeline(device: torch.device, runs: int, samples: Samples) -> None:
    """Add the hidden share of the copies, measured and predicted, for each speed of computing.

    A share is the part of a step's fetches and saves that nothing waited for. It is predicted from
    the medians of single stages, by ``drivers.layer_pipeline.pipeline``.
    """
    fingerprint = Fingerprint(
        model="bench",
        dtype="bfloat16",
        block_size_tokens=_TOKENS,
        num_layers=_LAYERS,
        num_kv_heads=_HEADS,
        head_size=_HEAD_SIZE,
        layout="LBHNC",
        page_bytes=_PAGE_BYTES,
    )
    pool = SlotPool(2 * _BLOCKS * fingerprint.slot_bytes)
    try:
        view = PoolView(pool.fd, pool.num_bytes, 1, fingerprint)
        step = _Step(view, device)
        step.whole(1, overlaps=True)  # pins the pool
        for ratio in COMPUTE_OVER_FETCH:
            _measure_ratio(step, ratio, runs, samples)
        step.copier.close()
    finally:
        pool.close()


def _measure_ratio(step: _Step, ratio: float, runs: int, samples: Samples) -> None:
    count = step.multiplications(ratio)
    for _ in range(runs):
        fetch_s, compute_s, store_s = step.stages(count)
        transfer_s = _LAYERS * (fetch_s + store_s)
        line = pipeline(*([seconds] * _LAYERS for seconds in (fetch_s, compute_s, store_s)))
        waited_s = line.fetch_wait_s + line.store_wait_s
        visible_s = step.whole(count, overlaps=True) - _LAYERS * compute_s
        serial_s = step.whole(count, overlaps=False) - _LAYERS * compute_s
        name = f"pipeline_at_{ratio:g}"
        samples[f"{name}_hidden_fraction"].append(hidden_fraction(transfer_s, visible_s))
        samples[f"{name}_serial_hidden_fraction"].append(hidden_fraction(transfer_s, serial_s))
        samples[f"{name}_predicted_hidden_fraction"].append(hidden_fraction(transfer_s, waited_s))


class _Step:
    """A prefill of which half is fetched and half is saved.

    Attributes:
        copier: Copier of the KV cache.
    """

    def __init__(self, view: PoolView, device: torch.device) -> None:
        shape = (2 * _BLOCKS, _HEADS, _TOKENS, 2 * _HEAD_SIZE)
        caches = [torch.zeros(shape, dtype=torch.bfloat16, device=device) for _ in range(_LAYERS)]
        self.copier = GpuCopier(caches, _PAGE_BYTES, 0)
        self._view = view
        self._matrix = torch.randn((_SIDE, _SIDE), dtype=torch.bfloat16, device=device)
        self._device = device

    def multiplications(self, ratio: float) -> int:
        """Return how often to multiply to take ``ratio`` times as long as a layer's fetch."""
        self.stages(8)
        fetch_s, compute_s, _ = self.stages(64)
        return max(1, round(ratio * fetch_s / (compute_s / 64)))

    def stages(self, count: int) -> tuple[float, float, float]:
        """Return median seconds of one layer's fetch, computation and save, each run alone."""
        fetches = [self._load(layer).finish() for layer in range(_LAYERS)]
        saves = [self._save(layer).finish() for layer in range(_LAYERS)]
        computes = [self._seconds(lambda: self._compute(count)) for _ in range(_LAYERS)]
        return median(fetches), median(computes), median(saves)

    def whole(self, count: int, *, overlaps: bool) -> float:
        """Return seconds of all layers; without overlap a stage waits for all of the one before."""
        return self._seconds(lambda: self._run(count, overlaps))

    def _run(self, count: int, overlaps: bool) -> None:
        loads = [self._load(layer) for layer in range(_LAYERS)]
        if not overlaps:
            loads[-1].join()
        saves = []
        for layer, load in enumerate(loads):
            load.join()
            self._compute(count)
            if overlaps:
                saves.append(self._save(layer))
        if not overlaps:
            saves = [self._save(layer) for layer in range(_LAYERS)]
        saves[-1].join()

    def _load(self, layer: int) -> QueuedCopy:
        ids = np.arange(_BLOCKS, dtype=np.int64)
        return self.copier.load(layer, self._view, ids, ids, self.copier.mark())

    def _save(self, layer: int) -> QueuedCopy:
        ids = np.arange(_BLOCKS, 2 * _BLOCKS, dtype=np.int64)
        return self.copier.save(layer, self._view, ids, ids, self.copier.mark())

    def _compute(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._matrix, self._matrix)

    def _seconds(self, work: Callable[[], object]) -> float:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize(self._device)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / 1e3
