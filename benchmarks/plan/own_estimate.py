"""AIConfigurator's own estimates of runs, from the package and nothing fitted.

Aggregated engines are estimated by the package itself (``run_agg``), for the prompt tokens of a
step that its search tries. Of a split the package estimates prefill and decode (``run_static``).
That the slower of both decides, and the factors below, are of the package aiconfigurator
(``sdk/picking.py``, ``sdk/task_v2.py``), which searches with it and is not needed here.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any, NamedTuple

from banaserve.sim.result import LatencyLimits
from benchmarks.plan.engines import ATTENTION, checkpoint
from benchmarks.plan.runs import EngineShape, ServedRun
from benchmarks.plan.verdicts import Means

_PREFILL_RATE, _DECODE_RATE = 0.9, 0.92
_PREFILL_LATENCY, _DECODE_LATENCY = 1.1, 1.08
_TTFT_QUEUEING = 1.8


class OwnEstimate(NamedTuple):
    """Means, and output tokens per second and GPU."""

    means: Means
    rate: float


def best_estimate(runs: Sequence[ServedRun], limits: LatencyLimits) -> float:
    """Return the highest estimated rate of ``runs`` within the limits; 0 if there is none."""
    found = (one for run in runs for one in estimates(run))
    return max((one.rate for one in found if one.means.is_within(limits)), default=0.0)


@cache
def estimates(run: ServedRun) -> tuple[OwnEstimate, ...]:
    """Return the estimates of ``run``, one for each number of prompt tokens in a step."""
    return (_split(run),) if run.is_split else tuple(_aggregated(run))


def _aggregated(run: ServedRun) -> Iterator[OwnEstimate]:
    model = _Model.of(run, run.engines.shape)
    batch = _batch(run)
    for tokens in sorted({run.prompt_tokens, 2 * run.prompt_tokens, 8192}):
        asked = model.asked(run, batch)
        found = model.backend.run_agg(model.model, model.database, asked, ctx_tokens=tokens)
        row = found.get_summary_df().iloc[0]
        means = Means(float(row["ttft"]) / 1e3, float(row["tpot"]) / 1e3)
        yield OwnEstimate(means, float(row["tokens/s/gpu"]))


def _split(run: ServedRun) -> OwnEstimate:
    assert run.prefill is not None
    of_prefill, of_decode = (
        _Model.of(run, workers.shape).static(run, mode, batch, scale)
        for workers, mode, batch, scale in (
            (run.prefill, "static_ctx", 1, _PREFILL_LATENCY),
            (run.engines, "static_gen", _batch(run), _DECODE_LATENCY),
        )
    )
    prompts = _PREFILL_RATE * run.prefill.number * of_prefill["seq/s"]
    answers = _DECODE_RATE * run.engines.number * of_decode["seq/s"]
    ttft_s = _TTFT_QUEUEING * float(of_prefill["ttft"]) / 1e3
    rate = float(min(prompts, answers)) * run.output_tokens / run.num_gpus
    return OwnEstimate(Means(ttft_s, float(of_decode["tpot"]) / 1e3), rate)


def _batch(run: ServedRun) -> int:
    groups = run.engines.number * run.engines.shape.data_parallel
    return -(-run.clients // groups)


class _Model(NamedTuple):
    """Engine as the package's Python interface knows it."""

    model: Any
    database: Any
    backend: Any

    @classmethod
    def of(cls, run: ServedRun, shape: EngineShape) -> _Model:
        return _model(run.backend, checkpoint(run), run.gpu, shape)

    def asked(self, run: ServedRun, batch: int) -> Any:
        from aiconfigurator_core.sdk.config import RuntimeConfig

        return RuntimeConfig(batch_size=batch, isl=run.prompt_tokens, osl=run.output_tokens)

    def static(self, run: ServedRun, mode: str, batch: int, scale: float) -> Any:
        found = self.backend.run_static(
            self.model,
            self.database,
            self.asked(run, batch),
            mode,
            latency_correction_scale=scale,
        )
        return found.get_summary_df().iloc[0]


@cache
def _model(backend: str, model: str, gpu: str, shape: EngineShape) -> _Model:
    from aiconfigurator_core.sdk.backends.factory import get_backend
    from aiconfigurator_core.sdk.config_builders import build_model_config
    from aiconfigurator_core.sdk.models import get_model
    from aiconfigurator_core.sdk.perf_database import get_database

    tensor, data, experts = shape
    config = build_model_config(
        tp_size=tensor,
        pp_size=1,
        attention_dp_size=data,
        moe_tp_size=shape.num_gpus // experts,
        moe_ep_size=experts,
        gemm_quant_mode=None,
        kvcache_quant_mode=None,
        fmha_quant_mode=ATTENTION,
        moe_quant_mode=None,
        comm_quant_mode=None,
    )
    database = get_database(gpu, backend, "current")
    return _Model(get_model(model, config, backend), database, get_backend(backend))
