"""An instance's reports, taken from the statistics that vLLM sends with its outputs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from vllm.config import VllmConfig
from vllm.v1.metrics.stats import IterationStats, MultiModalCacheStats, SchedulerStats

from banaserve.clock import Clock
from banaserve.engine.vllm import compat, metrics
from banaserve.types import InstanceId, InstanceReport

_SMOOTHING_S = 2.0


class ReportBoard:
    """Keeps the last report of one incarnation of an instance."""

    def __init__(self, instance_id: InstanceId, clock: Clock) -> None:
        self._id = instance_id
        self._clock = clock
        self._busy_fraction = 0.0
        self._busy_since_s = clock.now()
        self.last: InstanceReport | None = None

    def record(self, stats: SchedulerStats) -> None:
        """Take one step's statistics."""
        counted = stats.kv_connector_stats or {}
        metrics.count_transfers(self._id, counted)
        now_s = self._clock.now()
        self._smooth(float(counted.get("busy_seconds", 0.0)), now_s)
        self.last = InstanceReport(
            num_running=stats.num_running_reqs,
            num_waiting=stats.num_waiting_reqs + stats.num_skipped_waiting_reqs,
            kv_used_fraction=stats.kv_cache_usage,
            busy_fraction=self._busy_fraction,
            at_s=now_s,
        )

    def answered(self, idle: bool) -> None:
        """The engine has answered a question: what it last said still holds, or it is idle."""
        now_s = self._clock.now()
        self._smooth(0.0, now_s)
        last = self.last
        self.last = InstanceReport(
            num_running=0 if idle or last is None else last.num_running,
            num_waiting=0 if idle or last is None else last.num_waiting,
            kv_used_fraction=0.0 if idle or last is None else last.kv_used_fraction,
            busy_fraction=self._busy_fraction,
            at_s=now_s,
        )

    def _smooth(self, busy_s: float, now_s: float) -> None:
        elapsed_s = max(now_s - self._busy_since_s, 1e-6)
        self._busy_since_s = now_s
        weight = min(1.0, elapsed_s / _SMOOTHING_S)
        sample = min(1.0, busy_s / elapsed_s)
        self._busy_fraction += weight * (sample - self._busy_fraction)


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
