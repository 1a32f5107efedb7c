"""The kernels' benchmark runs through on the CPU with the reference, and checks what it times."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from banaserve.base.errors import UserError
from banaserve.kernels.interface import PartialAttention
from banaserve.kernels.reference import ReferenceKernels
from banaserve_bench.results import result
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


def test_what_is_run_on_a_gpu_machine_needs_no_vllm() -> None:
    assert Forked(import_without_vllm).wait() == 0
