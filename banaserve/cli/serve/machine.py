"""Server on this machine: the memory that it needs, whether it compiles, what it does on GPUs.

Computed alike for ``serve`` and ``doctor``.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from banaserve.base.config.serve_config import MINIATURE, ServeConfig
from banaserve.base.errors import UserError
from banaserve.kvstore.sizes import format_size, parse_size

CPU_KV_BYTES = 1 << 30
"""KV cache of one instance on a CPU, unless an option sets another size."""
_FRONT_BYTES = 450 * 2**20
"""Memory of the front door's process, most of it imports of vLLM, shared with no other process."""
_ENGINE_BYTES = 700 * 2**20
"""Memory of one engine process besides weights and KV cache, as measured on a CPU."""
_BESIDE = " (with --take-over, the running server has its own until this one serves)"


def instance_bytes(
    weight_bytes: int, kv_bytes: int | None = CPU_KV_BYTES, fraction: float = 0.0
) -> int:
    """Return the memory that one instance takes on a CPU.

    Args:
        kv_bytes: KV cache of one instance; None if it takes the remainder of ``fraction``.
        fraction: Fraction of the machine's memory that one instance takes in total.
    """
    each = _ENGINE_BYTES + weight_bytes + (kv_bytes or 0)
    if kv_bytes is None:
        each = max(each, int(fraction * psutil.virtual_memory().total))
    return each


def server_bytes(config: ServeConfig, each_bytes: int) -> int:
    """Return the memory of a server whose instances take ``each_bytes`` each on this machine."""
    pool = parse_size(config.kv_store_size) if config.kv_store else 0
    return _FRONT_BYTES + config.num_instances * each_bytes + pool


def check_memory(config: ServeConfig, each_bytes: int, available_bytes: int) -> None:
    """Check that a server fits into the memory that was available before it loaded vLLM.

    Args:
        each_bytes: Memory of one instance; 0 on GPUs, and if not known yet.

    Raises:
        UserError: The server does not fit.
    """
    needed = server_bytes(config, each_bytes)
    if needed > available_bytes:
        store = f" with --kv-store-size {config.kv_store_size}" if config.kv_store else ""
        raise UserError(
            f"{config.num_instances} instances{store} need about {format_size(needed)} of memory "
            f"and {format_size(available_bytes)} are available: give fewer instances (--pd), a "
            "smaller --kv-cache-memory-bytes, --gpu-memory-utilization or --kv-store-size, or a "
            f"smaller model{'' if config.take_over is None else _BESIDE}"
        )


_COMPILER = "g++"


@dataclass(frozen=True, slots=True)
class CompileChoice:
    """Decision whether a model is compiled, and the reason in one phrase."""

    is_compiled: bool
    reason: str

    def __str__(self) -> str:
        return f"{'compiled' if self.is_compiled else 'not compiled'}: {self.reason}"


def choose_compiling(config: ServeConfig, compiler: str | None) -> CompileChoice:
    """Return the faster choice that the configuration allows.

    A compiled model takes a sixth less processor time per decoded token and a minute longer to
    start. Its graphs contain all layers, so steps run without graphs while layers are away. The
    elastic policy moves no layers unless its options ask for it: engines on one processor would
    not relieve each other.

    Args:
        compiler: Path of a C++ compiler, for the graphs; None if there is none.
    """
    if config.pace or config.model == MINIATURE:
        return CompileChoice(False, "time is modelled")
    chosen = config.orchestrator
    if not chosen.is_elastic or dict(chosen.options).get("modules", "none") != "none":
        return CompileChoice(False, "layers and heads may move; --no-enforce-eager compiles")
    if compiler is None:
        return CompileChoice(False, "no C++ compiler was found, which a sixth of the speed needs")
    return CompileChoice(True, "steps while its layers or experts are away go without")


def find_compiler(environ: Mapping[str, str] = os.environ) -> str | None:
    """Return the path of the C++ compiler that torch uses; None if there is none."""
    return shutil.which(environ.get("CXX", _COMPILER))


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
