"""Memory that a server needs on this machine, computed alike for ``serve`` and ``doctor``."""

from __future__ import annotations

import psutil

from banaserve.base.config import ServeConfig
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
            f"smaller model{_BESIDE if config.take_over else ''}"
        )
