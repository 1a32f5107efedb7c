"""Engines of real runs, as aiconfigurator-core knows their operators."""

from __future__ import annotations

from functools import cache
from typing import Any

from banaserve.base.errors import UserError
from banaserve_bench.silicon.aiconfigurator import AiconfiguratorTimes
from benchmarks.plan.runs import EngineShape, ServedRun
from benchmarks.whole_runs import KnownEngine

STEP_TOKENS = 8192
"""Prompt tokens of a step, for each data-parallel group."""
_MEMORY_FRACTION = 0.9
_CHECKPOINTS = {"fp4": "nvidia/DeepSeek-V3.1-NVFP4"}
"""Checkpoints of precisions that the model's own config.json does not have."""
ATTENTION = "bfloat16"
"""Precision of DeepSeek's attention of prompts: the package has no other measurements of it."""


def engine_of(run: ServedRun, shape: EngineShape) -> KnownEngine | None:
    """Return an engine of ``run``, with the KV cache of one of its data-parallel groups.

    None if the package lacks its operators.
    """
    return _engine(run.backend, checkpoint(run), run.gpu, shape)


def checkpoint(run: ServedRun) -> str:
    """Return the checkpoint of ``run`` whose precisions the package knows."""
    return _CHECKPOINTS.get(run.precision, run.model)


@cache
def _engine(backend: str, model: str, gpu: str, shape: EngineShape) -> KnownEngine | None:
    from aiconfigurator_core.sdk.memory import estimate_kv_cache

    kinds = {"fmha": ATTENTION}
    tensor, data, experts = shape
    try:
        memory: dict[str, Any] = estimate_kv_cache(
            model,
            gpu,
            backend,
            "current",
            max_num_tokens=STEP_TOKENS,
            max_batch_size=1,
            memory_fraction_kind="of_free" if backend == "trtllm" else "of_total",
            memory_fraction_value=_MEMORY_FRACTION,
            tp_size=tensor,
            attention_dp_size=data,
            moe_tp_size=shape.num_gpus // experts,
            moe_ep_size=experts,
            **{f"{kind}_quant_mode": name for kind, name in kinds.items()},
        )
        times = AiconfiguratorTimes(model, gpu, tensor, experts > 1, kinds, data, backend)
    except (UserError, ValueError):
        return None
    return KnownEngine(times, int(memory["total_kv_size_tokens"]))
