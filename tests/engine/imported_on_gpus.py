"""Imports what runs on a machine with a GPU, where vLLM may be missing."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path


def import_without_vllm() -> None:
    """For a process of its own, which has not imported vLLM."""
    assert "vllm" not in sys.modules
    sys.modules["vllm"] = None  # type: ignore[assignment]
    sys.path.append(str(Path(__file__).parents[2]))
    for name in (
        "benchmarks.kernel_bandwidth.__main__",
        "banaserve.engine.connector.worker_side.gpu_block_copy",
        "banaserve.migration.kv.slabs",
        "banaserve.migration.host.block_mover",
        "banaserve.migration.modules.paged_attention",
        "banaserve.migration.kv.kv_staging",
    ):
        importlib.import_module(name)
