"""Environment variables that vLLM and oneDNN read. Imports nothing of vLLM."""

from __future__ import annotations

import importlib.util
import os

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # One entry for each step size and weight shape. With oneDNN's default of 1,024 an engine on a
    # CPU grew by half a gigabyte in a thousand prompts.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
    # A thread of NCCL's process group looks into the file by which the ranks met, for an order to
    # write a dump. Once that file is gone, it would keep ended ranks and their GPUs for 5 minutes.
    "TORCH_NCCL_DUMP_ON_TIMEOUT": "0",
}
"""Defaults that engines need when several share a machine; the user's own settings win."""


INSTANCE_VARIABLE = "BANASERVE_INSTANCE"
"""Variable with the instance's name for its workers, which are one client of the store."""


STORE_VARIABLE = "BANASERVE_STORE_SOCKET"
"""Variable with the socket of this machine's store, if it differs from the engine's options.

Engines of several machines have the same options.
"""

GRAPHS_VARIABLE = "VLLM_USE_BREAKABLE_CUDAGRAPH"
"""vLLM's variable for CUDA graphs of the uncompiled model.

vLLM reads it when it is imported, so engines must inherit it.
"""


def engine_environment() -> dict[str, str]:
    """Return the defaults for this machine: ``ENVIRONMENT``, and what its packages call for."""
    found = dict(ENVIRONMENT)
    if importlib.util.find_spec("flashinfer") is None:
        # vLLM on a GPU imports it for sampling unless it is told not to, and its engines end.
        found["VLLM_USE_FLASHINFER_SAMPLER"] = "0"
    return found


def set_environment() -> None:
    """Set the environment variables that engines inherit from this process."""
    for name, value in engine_environment().items():
        os.environ.setdefault(name, value)
