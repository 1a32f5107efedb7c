"""An instance's reports, taken from the statistics that vLLM sends with its outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from banaserve.clock import Clock
from banaserve.engine.vllm import compat, metrics
from banaserve.engine.vllm.gpu_usage import GpuMeter
from banaserve.engine.vllm.step_meter import StepMeter
from banaserve.types import InstanceId, InstanceReport

_LEARN_EVERY_S = 0.05
"""Learning from a step costs the front door as much as passing on a token: the short steps of a
small model are learnt from together, longer ones each."""


class ReportBoard:
    """Keeps the last report of one incarnation of an instance.

    Args:
        full_step_tokens: The most tokens that one of its steps may compute.
        gpu: Reads its GPUs; None where they cannot be read.
    """

    def __init__(
        self,
        instance_id: InstanceId,
        clock: Clock,
        full_step_tokens: int = 0,
        gpu: GpuMeter | None = None,
    ) -> None:
        self._id = instance_id
        self._clock = clock
        self.meter = StepMeter(full_step_tokens, clock.now())
        self.last: InstanceReport | None = None
        self._gpu = gpu
        self._unlearnt: dict[str, float] = {}
        self._learnt_s = float("-inf")
        self._step_error = metrics.STEP_ERROR.labels("step", self._id)

    def record(self, stats: SchedulerStats) -> None:
        """Take the statistics of one step, or of several."""
        counted = stats.kv_connector_stats or {}
        metrics.count_transfers(self._id, counted)
        for name, amount in counted.items():
            self._unlearnt[name] = self._unlearnt.get(name, 0.0) + amount
        if self._clock.now() - self._learnt_s >= _LEARN_EVERY_S:
            self._learn()
        self.last = self._report(
            stats.num_running_reqs,
            stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            stats.kv_cache_usage,
        )

    def answered(self, idle: bool) -> None:
        """The engine has answered a question: what it last said still holds, or it is idle."""
        self._learn()
        last = self.last
        if idle or last is None:
            self.last = self._report(0, 0, 0.0)
        else:
            self.last = self._report(last.num_running, last.num_waiting, last.kv_used_fraction)

    def _learn(self) -> None:
        """Let the meter take what was counted since the last time, which may be nothing."""
        counted, self._unlearnt = self._unlearnt, {}
        self._learnt_s = self._clock.now()
        self.meter.record(counted, self._learnt_s)
        self._step_error.set(self.meter.model.error_fraction)

    def _report(self, num_running: int, num_waiting: int, kv_used: float) -> InstanceReport:
        meter = self.meter
        usage = self._gpu.read() if self._gpu is not None else None
        return InstanceReport(
            num_running=num_running,
            num_waiting=num_waiting,
            kv_used_fraction=kv_used,
            busy_fraction=meter.busy_fraction,
            at_s=self._clock.now(),
            step_fill_fraction=meter.fill_fraction,
            step_s=meter.step_s,
            step_tokens=meter.step_tokens,
            gpu_busy_fraction=usage.busy_fraction if usage else None,
            gpu_memory_fraction=usage.memory_fraction if usage else None,
        )


class SharedPrometheus:
    """vLLM's Prometheus logger, once for all instances: a second one would remove the first.

    Each instance is an engine index in it; the front door adds the instance's id as a label.
    """

    def __init__(self, config: VllmConfig, instance_ids: list[InstanceId]) -> None:
        self.index = {instance_id: i for i, instance_id in enumerate(instance_ids)}
        self.logger = compat.PrometheusStatLogger(config, list(range(len(instance_ids))))

    def logger_class(
        self, instance_id: InstanceId, on_stats: Callable[[SchedulerStats], None]
    ) -> type[Any]:
        """A logger class for one instance's engine client that passes everything on."""
        shared, index = self.logger, self.index[instance_id]

        class InstanceLogger(compat.PrometheusStatLogger):
            def __init__(
                self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None
            ) -> None:
                pass  # registers nothing: the shared logger has

            def record(
                self,
                scheduler_stats: SchedulerStats | None,
                iteration_stats: IterationStats | None,
                mm_cache_stats: MultiModalCacheStats | None = None,
                engine_idx: int = 0,
            ) -> None:
                shared.record(scheduler_stats, iteration_stats, mm_cache_stats, index)
                if scheduler_stats is not None:
                    on_stats(scheduler_stats)

            def log_engine_initialized(self) -> None:
                pass

            def log(self) -> None:
                pass

            def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
                pass

            def record_admission_rejection(self, reason: str) -> None:
                shared.record_admission_rejection(reason)

        return InstanceLogger
