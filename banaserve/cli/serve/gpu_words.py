"""Words on what a server does on GPUs: what is on, what is off, and why."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class GpuParts:
    """Optional parts of an installation that a server on GPUs uses.

    Attributes:
        has_slabs: True if banaserve was built with CUDA, and gives back the memory of moved KV.
        has_flashinfer: True if FlashInfer is installed.
        has_nixl: True if NIXL is installed.
    """

    has_slabs: bool
    has_flashinfer: bool
    has_nixl: bool


@dataclass(frozen=True, slots=True)
class GpuUse:
    """Use of GPUs by a server.

    Attributes:
        blocker: Reason why nothing can move; empty if layers and heads can.
        graphs: Words on CUDA graphs.
        num_ranks: Number of tensor-parallel ranks of an instance; 0 if it is not known yet.
        crosses: True if instances run on several machines.
        transport: Value of ``--migration-transport``.
        attention: Value of ``--migration-attention``.
    """

    blocker: str = ""
    graphs: str = ""
    num_ranks: int = 0
    crosses: bool = False
    transport: str = "shm"
    attention: str = "auto"


def installed() -> GpuParts:
    """Return the parts of this installation; imports none of them."""
    names = ("banaserve._native_cuda", "flashinfer", "nixl")
    return GpuParts(*(importlib.util.find_spec(name) is not None for name in names))


def gpu_words(use: GpuUse, parts: GpuParts) -> str:
    """Return one line on moves, graphs, tensor parallelism, transport of GPU memory and kernels."""
    if use.blocker:
        return f"moves off: {use.blocker}"
    slabs = ", without giving GPU memory back (no BANASERVE_CUDA=1 build)"
    words = [
        "moves on" if parts.has_slabs else f"moves on{slabs}",
        use.graphs,
        _rank_words(use.num_ranks),
        _transport_words(use, parts),
        _attention_words(use.attention, parts),
    ]
    return "; ".join(filter(None, words))


def _rank_words(num_ranks: int) -> str:
    if num_ranks == 1:
        return "no tensor parallelism"
    each = "tensor parallelism" if not num_ranks else f"{num_ranks} tensor-parallel ranks"
    return f"{each} with a guest process and a GPU for each rank"


def _transport_words(use: GpuUse, parts: GpuParts) -> str:
    here = "KV and activations by CUDA IPC within a machine"
    if use.transport == "nixl":
        return f"{here}, by NIXL between machines"
    if use.crosses:
        return f"{here}, through host memory between machines (--migration-transport nixl is off)"
    if not use.num_ranks:
        return here if parts.has_nixl else f"{here} (NIXL, for several machines, is not installed)"
    return here


def _attention_words(attention: str, parts: GpuParts) -> str:
    if attention == "flashinfer":
        return "FlashInfer for what has moved"
    why = "not asked for" if parts.has_flashinfer else "not installed"
    return f"FlashInfer off: {why}"
