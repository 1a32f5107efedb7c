"""vLLM's Prometheus series of each instance, in separate registries."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from prometheus_client import REGISTRY, CollectorRegistry, Gauge
from prometheus_client.registry import Collector

from banaserve.base.types import InstanceId
from banaserve.engine.compat import engine as compat
from banaserve.engine.compat.config import VllmConfig
from banaserve.engine.compat.engine import IterationStats, MultiModalCacheStats, SchedulerStats
from banaserve.engine.compat.front import clients
from banaserve.serving.monitoring.leg_stats import IterationByLeg, Leg, add

OF_PROMPTS = frozenset(
    {
        "vllm:prompt_tokens",
        "vllm:prompt_tokens_by_source",
        "vllm:prompt_tokens_cached",
        "vllm:request_prompt_tokens",
        "vllm:request_prefill_kv_computed_tokens",
        "vllm:request_queue_time_seconds",
        "vllm:request_prefill_time_seconds",
    }
)
"""Metrics of a request's prompt, counted in its prefill leg if it has one."""
OF_OUTPUT = frozenset(
    {
        "vllm:request_success",
        "vllm:corrupted_requests",
        "vllm:watermark_requests",
        "vllm:generation_tokens",
        "vllm:request_generation_tokens",
        "vllm:request_max_num_generation_tokens",
        "vllm:request_params_n",
        "vllm:request_params_max_tokens",
        "vllm:request_num_preemptions",
        "vllm:time_to_first_token_seconds",
        "vllm:inter_token_latency_seconds",
        "vllm:request_time_per_output_token_seconds",
        "vllm:request_decode_time_seconds",
        "vllm:request_inference_time_seconds",
        "vllm:e2e_request_latency_seconds",
    }
)
"""Metrics of a request and its output, counted in its decode leg if it has two legs."""
_BY_LEG = {
    Leg.PREFILL: OF_PROMPTS,
    Leg.DECODE: OF_OUTPUT,
    Leg.WHOLE: OF_PROMPTS | OF_OUTPUT,
}
LabelledRegistry = tuple[Mapping[str, str], CollectorRegistry]
"""Labels for all series of a registry, and the registry."""


_MAX_STEPS = 64
_MAX_OUTPUTS = 256
"""Steps and outputs whose statistics wait to be applied together: at most half a millisecond."""


class _StepStats(NamedTuple):
    """Statistics of one batch of outputs; ``scheduler`` is None if no step made them."""

    scheduler: SchedulerStats | None
    iteration: IterationByLeg | None
    mm_cache: MultiModalCacheStats | None


class EngineSeries:
    """vLLM's Prometheus series of each instance, in registries that come and go with instances.

    vLLM's logger uses one registry of the process for all engines, and a second logger would remove
    the series of the first. Each instance has an engine index of its own. Metrics of requests are
    kept for each kind of leg, so that a sum over all legs and instances counts each request once.
    """

    def __init__(self, config: VllmConfig) -> None:
        clients.set_iteration_stats(IterationByLeg)
        self._config = config
        self._indexes = itertools.count()
        self._instances: dict[InstanceId, _InstanceSeries] = {}

    @property
    def registries(self) -> Sequence[LabelledRegistry]:
        """Registries with series to show now; to be read on the thread that records."""
        return [
            labelled for one in tuple(self._instances.values()) for labelled in one.registries()
        ]

    def add(self, instance_id: InstanceId) -> None:
        self._instances[instance_id] = _InstanceSeries(
            self._config, next(self._indexes), instance_id
        )

    def forget(self, instance_id: InstanceId) -> None:
        self._instances.pop(instance_id, None)

    def engine_ended(self, instance_id: InstanceId) -> None:
        """Set the gauges to those of an idle engine; nothing is done for a forgotten instance."""
        if instance_id in self._instances:
            self._instances[instance_id].record(SchedulerStats(), None, None)

    def logger_class(
        self, instance_id: InstanceId, on_stats: Callable[[SchedulerStats], None]
    ) -> type[Any]:
        """Make a logger class for one instance's engine client, which passes everything on."""
        series = self._instances[instance_id]

        class InstanceLogger(compat.PrometheusStatLogger):
            def __init__(
                self, vllm_config: VllmConfig, engine_indexes: list[int] | None = None
            ) -> None:
                # Registers no series: the instance's own loggers did, and outlive its engine.
                self._config = vllm_config

            def record(
                self,
                scheduler_stats: SchedulerStats | None,
                iteration_stats: IterationStats | None,
                mm_cache_stats: MultiModalCacheStats | None = None,
                engine_idx: int = 0,
            ) -> None:
                assert iteration_stats is None or isinstance(iteration_stats, IterationByLeg)
                series.record(scheduler_stats, iteration_stats, mm_cache_stats)
                if scheduler_stats is not None:
                    on_stats(scheduler_stats)

            def log_engine_initialized(self) -> None:
                series.show_cache(self._config)

            def log(self) -> None:
                pass

            def record_sleep_state(self, sleep: int = 0, level: int = 0) -> None:
                pass

            def record_admission_rejection(self, reason: str) -> None:
                series.engine.record_admission_rejection(reason)

        return InstanceLogger


class _InstanceSeries:
    """Loggers and registries of one instance: of its engine, and of each kind of leg.

    Attributes:
        engine: vLLM's logger of the metrics that do not belong to single requests.
    """

    def __init__(self, config: VllmConfig, index: int, instance_id: InstanceId) -> None:
        self._index, self._id = index, instance_id
        self.engine, self._of_engine = _logger_apart(
            config, index, lambda name: name not in OF_PROMPTS | OF_OUTPUT
        )
        self._legs = {
            leg: _logger_apart(config, index, shown.__contains__) for leg, shown in _BY_LEG.items()
        }
        self._of_cache = CollectorRegistry()
        self._counted = {Leg.WHOLE}
        self._unapplied: list[_StepStats] = []
        self._num_outputs = 0

    def registries(self) -> Iterator[LabelledRegistry]:
        """Yield the registries to show: the engine's, of legs counted so far, and of whole ones."""
        self._apply()
        yield {"instance_id": self._id}, self._of_engine
        yield {"instance_id": self._id}, self._of_cache
        for leg, (_, registry) in self._legs.items():
            if leg in self._counted:
                yield {"instance_id": self._id, "leg": leg.value}, registry

    def show_cache(self, config: VllmConfig) -> None:
        """Show the engine's KV cache, whose number of blocks is known once the engine is ready."""
        facts = {**config.cache_config.metrics_info(), "engine": str(self._index)}
        made = CollectorRegistry()
        words = "Information of the LLMEngine CacheConfig"
        info = Gauge("vllm:cache_config_info", words, labelnames=facts, registry=made)
        info.labels(**facts).set(1)
        self._of_cache = made

    def record(
        self,
        scheduler_stats: SchedulerStats | None,
        iteration: IterationByLeg | None,
        mm_cache_stats: MultiModalCacheStats | None,
    ) -> None:
        """Take the statistics of outputs, and of the step that they come from, if any.

        They are applied to the series later, many steps at once: that costs the front door a
        fraction of the time, and a scrape applies what is left.
        """
        self._unapplied.append(_StepStats(scheduler_stats, iteration, mm_cache_stats))
        self._num_outputs += 1 if iteration is None else iteration.num_outputs
        if len(self._unapplied) >= _MAX_STEPS or self._num_outputs >= _MAX_OUTPUTS:
            self._apply()

    def _apply(self) -> None:
        """Count everything that has been recorded since the last call."""
        steps, self._unapplied, self._num_outputs = self._unapplied, [], 0
        by_leg: dict[Leg, IterationStats] = {}
        latest = max((n for n, one in enumerate(steps) if one.scheduler is not None), default=-1)
        for number, (scheduler, iteration, mm_cache) in enumerate(steps):
            if number == latest or mm_cache is not None or _has_counts(scheduler):
                self.engine.record(scheduler, None, mm_cache, self._index)
            if iteration is None:
                continue
            if scheduler is not None:
                self._count_step(iteration)
            for leg, counts in iteration.by_leg.items():
                if leg in self._legs:
                    add(by_leg.setdefault(leg, IterationStats()), counts)
        for leg, counts in by_leg.items():
            self._counted.add(leg)
            self._legs[leg][0].record(None, counts, None, self._index)

    def _count_step(self, step: IterationByLeg) -> None:
        """Count what belongs to the engine and its step rather than to requests."""
        self.engine.histogram_iteration_tokens[self._index].observe(step.num_step_tokens)
        if num_preempted := sum(one.num_preempted_reqs for one in step.by_leg.values()):
            self.engine.counter_num_preempted_reqs[self._index].inc(num_preempted)


def _has_counts(stats: SchedulerStats | None) -> bool:
    """Return whether statistics add to counters, and not only replace the values of gauges."""
    if stats is None:
        return False
    of_connector = stats.connector_prefix_cache_stats
    return bool(
        stats.prefix_cache_stats.queries
        or (of_connector is not None and of_connector.queries)
        or stats.spec_decoding_stats
        or stats.ec_connector_stats
        or stats.perf_stats
        or stats.kv_cache_eviction_events
    )


def _logger_apart(
    config: VllmConfig, index: int, shows: Callable[[str], bool]
) -> tuple[Any, CollectorRegistry]:
    """Make vLLM's logger for one engine, and a registry with those of its series that are shown.

    vLLM's constructor registers its series in the registry of the process, and removes all earlier
    ones with vLLM's prefix, which are put back here.
    """
    others = _vllm_collectors()
    logger = compat.PrometheusStatLogger(config, [index])
    own = CollectorRegistry(auto_describe=False)
    for collector in _vllm_collectors():
        REGISTRY.unregister(collector)
        if shows(_name(collector)):
            own.register(collector)
    for collector in others:
        REGISTRY.register(collector)
    return logger, own


def _vllm_collectors() -> list[Collector]:
    return [one for one in list(REGISTRY._collector_to_names) if _name(one).startswith("vllm:")]


def _name(collector: Collector) -> str:
    return str(getattr(collector, "_name", ""))
