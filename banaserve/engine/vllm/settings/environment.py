"""Environment variables that vLLM and oneDNN read. Imports nothing of vLLM."""

from __future__ import annotations

import os

ENVIRONMENT = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    # One for each size of a step and shape of a weight. With oneDNN's own 1,024 an engine on a CPU
    # had grown by half a gigabyte after a thousand prompts.
    "ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256",
}
"""Defaults that engines need when several share a machine; the user's own settings win."""


INSTANCE_VARIABLE = "BANASERVE_INSTANCE"
"""Names the instance to its workers: all of them are one client of the store."""


STORE_VARIABLE = "BANASERVE_STORE_SOCKET"
"""Where the store of this machine listens, if that is not where the engine's options say: engines
of several machines have the same options."""


def set_environment() -> None:
    """Set what engines inherit from this process."""
    for name, value in ENVIRONMENT.items():
        os.environ.setdefault(name, value)
