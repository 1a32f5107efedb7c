"""One line on what a server does on GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest

from banaserve.cli.serve.machine import GpuParts, GpuUse, gpu_words, installed

ALL = GpuParts(has_slabs=True, has_flashinfer=True, has_nixl=True)
NONE = GpuParts(has_slabs=False, has_flashinfer=False, has_nixl=False)
IPC = "KV and activations by CUDA IPC within a machine"


@pytest.mark.parametrize(
    ("use", "parts", "words"),
    [
        (GpuUse(blocker="LoRA adapters"), ALL, "moves off: LoRA adapters"),
        (
            GpuUse(num_ranks=1, graphs="no CUDA graphs, as asked"),
            ALL,
            "moves on; no CUDA graphs, as asked; no tensor parallelism; "
            f"{IPC}; FlashInfer off: not asked for",
        ),
        (
            GpuUse(num_ranks=4, transport="nixl", attention="flashinfer"),
            ALL,
            "moves on; 4 tensor-parallel ranks with a guest process and a GPU for each rank; "
            f"{IPC}, by NIXL between machines; FlashInfer for what has moved",
        ),
        (
            GpuUse(),
            NONE,
            "moves on, without giving GPU memory back (no BANASERVE_CUDA=1 build); "
            "tensor parallelism with a guest process and a GPU for each rank; "
            f"{IPC} (NIXL, for several machines, is not installed); FlashInfer off: not installed",
        ),
        (
            GpuUse(num_ranks=1, crosses=True, transport="tcp"),
            ALL,
            f"moves on; no tensor parallelism; {IPC}, through host memory between machines "
            "(--migration-transport nixl is off); FlashInfer off: not asked for",
        ),
    ],
)
def test_a_line_says_what_is_on_and_why_not(use: GpuUse, parts: GpuParts, words: str) -> None:
    assert gpu_words(use, parts) == words


def test_what_is_installed_here_makes_a_line() -> None:
    assert gpu_words(replace(GpuUse(), num_ranks=2), installed()).startswith("moves on")
