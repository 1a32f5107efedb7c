"""The kernels' benchmark runs through on the CPU with the reference, and checks what it times."""

from __future__ import annotations

import contextlib
import ctypes
import time
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from banaserve.base.errors import UserError
from banaserve.engine.connector.worker_side import gpu_block_copy
from banaserve.kernels.interface import PartialAttention
from banaserve.kernels.reference import ReferenceKernels
from banaserve_bench.results import result
from benchmarks.kernel_bandwidth import pipeline
from benchmarks.kernel_bandwidth.__main__ import main
from benchmarks.kernel_bandwidth.work import SIZES, all_work, attention_work
from forked import Forked
from imported_on_gpus import import_without_vllm

TINY = ["--device", "cpu", "--sizes", "tiny", "--runs", "2", "--repeats", "1"]


def test_all_cases_are_timed_and_written(tmp_path: Path) -> None:
    path = tmp_path / "kernels.json"
    assert main([*TINY, "--json", str(path)]) == 0
    record = result.read(path)
    for case in ("decode_batch", "decode_long", "merge", "pack", "unpack_half_heads"):
        assert min(record.figures[f"{case}_copy_fraction"].samples) > 0
        assert len(record.figures[f"{case}_ms"].samples) == 2
    assert "prefill_chunk_copy_fraction" not in record.figures
    assert record.figures["prefill_chunk_over_sdpa_speedup"].median > 0
    assert any(note.startswith("kernels: reference (triton") for note in record.notes)
    assert any("flashinfer was not measured" in note for note in record.notes)
    assert any("not on a GPU" in note for note in record.notes)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do() -> None:
    with pytest.raises(UserError, match="no CUDA GPU: run it where one is"):
        main(["--runs", "1"])


class Wrong(ReferenceKernels):
    """Right but for one token's output, or one byte."""

    def partial_attention(self, *arguments, **named) -> PartialAttention:
        part = super().partial_attention(*arguments, **named)
        part.output[0] *= -1
        return part

    def pack_blocks(self, copies) -> None:
        super().pack_blocks(copies)
        copies.pages[0, 0] ^= 1


def test_wrong_results_are_not_timed() -> None:
    device = torch.device("cpu")
    with pytest.raises(UserError, match="decode: our result differs"):
        attention_work("decode", Wrong(), device, 2, 1, 32, (0, 1))
    later = all_work(SIZES["tiny"], ReferenceKernels(), device, 0)
    assert [works[0].name for works, _ in later][-2:] == ["pack", "pack_half_heads"]
    from benchmarks.kernel_bandwidth.work import pack_work

    with pytest.raises(UserError, match="our bytes differ"):
        pack_work("", Wrong(), device, SIZES["tiny"], tuple(range(8)))


class _Event:
    """CUDA's, where whatever is queued has run when the call returns."""

    def __init__(self, enable_timing: bool = False) -> None:
        self.at_s = 0.0

    def record(self, stream: object = None) -> None:
        self.at_s = time.perf_counter()

    def synchronize(self) -> None:
        return

    def elapsed_time(self, end: _Event) -> float:
        return 1e3 * (end.at_s - self.at_s)


def test_the_pipeline_is_measured_and_predicted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU its place is taken by calls that do at once what they would queue."""
    moved = []

    def copy(targets, sources, num_bytes, stream):
        moved.append(len(targets))
        for target, source in zip(targets.tolist(), sources.tolist(), strict=True):
            ctypes.memmove(target, source, num_bytes)
        return ()

    stream = SimpleNamespace(cuda_stream=7, wait_event=lambda event: None, synchronize=lambda: None)
    runtime = SimpleNamespace(cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda *_: 0)
    for name, double in {
        "Event": _Event,
        "Stream": lambda device: stream,
        "current_stream": lambda: stream,
        "device": lambda device: contextlib.nullcontext(),
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda device: None,
        "cudart": lambda: runtime,
    }.items():
        monkeypatch.setattr(torch.cuda, name, double)
    monkeypatch.setattr(gpu_block_copy, "choose_copies", lambda *_: copy)
    for name, size in {"_LAYERS": 3, "_BLOCKS": 2, "_SIDE": 16}.items():
        monkeypatch.setattr(pipeline, name, size)
    samples: dict[str, list[float]] = defaultdict(list)
    pipeline.measure_pipeline(torch.device("cpu"), 2, samples)
    kinds = ("hidden", "serial_hidden", "predicted_hidden")
    assert set(samples) == {
        f"pipeline_at_{ratio}_{kind}_fraction" for ratio in ("0.5", "1", "2") for kind in kinds
    }
    for found in samples.values():
        assert len(found) == 2
        assert all(0 <= share <= 1 for share in found)
    assert set(moved) == {2}


def test_what_is_run_on_a_gpu_machine_needs_no_vllm() -> None:
    assert Forked(import_without_vllm).wait() == 0
