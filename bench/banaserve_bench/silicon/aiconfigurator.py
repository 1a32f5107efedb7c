"""Step times from the operators that the package aiconfigurator-core brings."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from typing import Any

from banaserve.base.errors import UserError
from banaserve_bench.silicon.attention import Contexts

PACKAGE_MISSING = (
    "step times of aiconfigurator need its package: pip install 'banaserve-bench[plan]'"
)
MOST_CHARS = 200
"""Maximum length of what is shown of the package's errors, some of which list all that it knows."""
_ALL_REDUCE = re.compile(r"_ar(_\d+)?$|_dispatch$")
"""End of the package's names of all-reduces; with experts, those of a layer are dispatches."""
PRECISIONS = ("gemm", "moe", "kvcache", "fmha")
"""Kinds of operators whose precision can be other than the config.json's."""


class AiconfiguratorTimes:
    """Step times of one engine (``GpuStepTimes``), from operators of aiconfigurator-core.

    Attention of a mixed step is the sum of its parts, since the package has no measurements of
    kernels that compute both at once, nor of unequal contexts. Data-parallel groups step together;
    a step's prompts and requests are spread over them evenly, so that it takes as long as the group
    with most of them.

    Args:
        model: Folder with a config.json, or a name whose config.json the package brings.
        system: Name of the GPU in the package, such as ``h100_sxm``.
        tensor_parallel: Number of GPUs of the engine, or of each of its data-parallel groups.
        expert_parallel: True if each GPU holds whole experts instead of a part of each.
        precisions: The package's names of precisions by kind of operator, such as ``fp8`` for
            ``gemm``; the config.json's where there is none. Its GEMMs with block scales
            (``fp8_block``) are several times slower than those that vLLM runs.
        data_parallel: Number of groups of GPUs with requests of their own.
        backend: Engine whose operators they are, as the package names it.

    Raises:
        UserError: The package is not installed, or has no operators for this model and GPU.
    """

    def __init__(
        self,
        model: str,
        system: str,
        tensor_parallel: int = 1,
        expert_parallel: bool = False,
        precisions: Mapping[str, str] | None = None,
        data_parallel: int = 1,
        backend: str = "vllm",
    ) -> None:
        try:
            from aiconfigurator_core.sdk.engine import EngineHandle
        except ImportError as error:
            raise UserError(PACKAGE_MISSING) from error
        # The package logs each table that it replaces by a similar one.
        logging.getLogger("aiconfigurator_core").setLevel(logging.ERROR)
        width = tensor_parallel * data_parallel
        experts = width if expert_parallel else 1
        self._groups = data_parallel
        self._all_reduces_s: dict[int, float] = {}
        try:
            self._engine: Any = EngineHandle.compile(
                model,
                system,
                backend,
                tp_size=tensor_parallel,
                attention_dp_size=data_parallel,
                moe_tp_size=width // experts,
                moe_ep_size=experts,
                **{f"{kind}_quant_mode": name for kind, name in (precisions or {}).items()},
            )
            self.step_s(1, 1, 1, 1)
        except Exception as error:
            # Errors of the package's tables have no common class; each is a matter of the options.
            told = " ".join(str(error).split())[:MOST_CHARS]
            raise UserError(f"no step times of {model} on {system}: {told}") from error

    def step_s(
        self, tokens: int, pairs: int, batch: int, context: int, contexts: Contexts | None = None
    ) -> float:
        """Return the GPU's time of one step; see ``GpuStepTimes``."""
        engine = self._engine
        each = max(1, round(context / batch)) if batch else 0
        batch = -(-batch // self._groups)
        if not tokens:
            return float(engine.predict_decode_latency(batch, each)) / 1e3
        # Several prompts in a step are as many equal ones with as many pairs together.
        computed = max(0, round((pairs / tokens - tokens) / 2))
        length = max(1, min(tokens, round(pairs / tokens - 2 * computed)))
        prompts = max(1, round(tokens / length))
        if self._groups > 1:
            prompts = -(-prompts // self._groups)
            tokens = prompts * length
        total_ms = float(engine.predict_prefill_latency(prompts, computed + length, computed))
        if batch:
            # The package attends to a chunk's computed tokens only where nothing decodes.
            alone = engine.mixed_step_breakdown(tokens, 0, length, 2)
            _, mixed_ms, _, decode_ms = engine.mixed_step_breakdown(tokens, batch, each, 2)
            total_ms += mixed_ms - alone[1] + decode_ms
        return total_ms / 1e3

    def all_reduces_s(self, tokens: int) -> float:
        """Return the time of a step's all-reduces between the GPUs of a group, in seconds."""
        if tokens not in self._all_reduces_s:
            shared, *_ = self._engine.mixed_step_breakdown_per_op(tokens, 0, tokens, 2)
            self._all_reduces_s[tokens] = sum(
                ms / 1e3 for name, ms, *_ in shared if _ALL_REDUCE.search(name)
            )
        return self._all_reduces_s[tokens]
