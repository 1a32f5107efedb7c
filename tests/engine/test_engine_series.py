"""vLLM's series of an instance: those of requests by leg, all others of the engine."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

pytest.importorskip("vllm")

from prometheus_client import REGISTRY, CollectorRegistry
from vllm.v1.engine import EngineCoreOutput, FinishReason
from vllm.v1.metrics.stats import LoRARequestStates, PrefillStats, SchedulerStats

from banaserve.base.types import InstanceId
from banaserve.serving.monitoring.engine_series import OF_OUTPUT, OF_PROMPTS, EngineSeries
from banaserve.serving.monitoring.leg_stats import IterationByLeg, Leg, LegRequestStats

OF_STEPS = {"vllm:iteration_tokens_total"}
SILENT = {"vllm:corrupted_requests", "vllm:watermark_requests", "vllm:prompt_tokens_cached"}
"""Metrics of what the request has not, or whose option is off."""
LEGS = (Leg.PREFILL, Leg.DECODE, Leg.WHOLE, Leg.UNCOUNTED)


def an_iteration(leg: Leg, finish: FinishReason = FinishReason.LENGTH) -> IterationByLeg:
    """A request of ten prompt tokens that ends with its second token."""
    iteration, stats = IterationByLeg(), LegRequestStats(arrival_time=1.0, leg=leg)
    for is_first in (True, False):
        output = EngineCoreOutput("r", [5])
        output.prefill_stats = PrefillStats(num_prompt_tokens=10, num_computed_tokens=10)
        iteration.update_from_output(output, 2.0, is_first, stats, LoRARequestStates(), None)
    iteration.update_from_finished_request(finish, "r", 10, 2, stats)
    return iteration


def counted(series: EngineSeries) -> dict[str, set[str]]:
    """Families with a sample above zero, by leg; of the engine under an empty name."""
    found: dict[str, set[str]] = {}
    for labels, registry in series.registries:
        assert labels["instance_id"] == "d0"
        names = found.setdefault(labels.get("leg", ""), set())
        names |= {family.name for family in registry.collect() if _is_counted(family)}
    return found


def _is_counted(family: object) -> bool:
    return any(
        one.value > 0 and not one.name.endswith(("_created", "_info"))
        for one in getattr(family, "samples", ())
    )


class Config(SimpleNamespace):
    """vLLM's configuration without any option that is off by default."""

    def __getattr__(self, name: str) -> None:
        return None


@pytest.fixture
def series() -> EngineSeries:
    model = SimpleNamespace(served_model_name="m", max_model_len=64, is_diffusion=False)
    options = SimpleNamespace(
        show_hidden_metrics=False,
        kv_cache_metrics=False,
        enable_mfu_metrics=False,
        custom_histogram_buckets=None,
    )
    made = EngineSeries(Config(model_config=model, observability_config=options))
    made.add(InstanceId("d0"))
    return made


@pytest.mark.parametrize("leg", LEGS)
def test_each_metric_of_requests_has_its_legs(series: EngineSeries, leg: Leg) -> None:
    """A new metric of vLLM's that counts requests is found here: it would show as the engine's."""
    logger = series.logger_class(InstanceId("d0"), lambda _: None)(None)
    before = counted(series)
    assert before.keys() == {"", "whole"}
    logger.record(SchedulerStats(), an_iteration(leg))
    found = {name: names - before.get(name, set()) for name, names in counted(series).items()}
    assert found.pop("") == OF_STEPS
    if leg is Leg.UNCOUNTED:
        assert found == {"whole": set()}
        return
    shown = found.pop(leg.value)
    assert not any(found.values())
    wanted = {Leg.PREFILL: OF_PROMPTS, Leg.DECODE: OF_OUTPUT, Leg.WHOLE: OF_PROMPTS | OF_OUTPUT}
    assert wanted[leg] - SILENT <= shown <= wanted[leg]


@pytest.mark.parametrize(
    ("finish", "leg"),
    [(FinishReason.ERROR, "whole"), (FinishReason.ABORT, None), (FinishReason.STOP, "prefill")],
)
def test_a_prefill_leg_that_fails_ends_its_request_or_is_tried_again(
    series: EngineSeries, finish: FinishReason, leg: str | None
) -> None:
    logger = series.logger_class(InstanceId("d0"), lambda _: None)(None)
    logger.record(None, an_iteration(Leg.PREFILL, finish))
    queued = {
        labels["leg"]: registry.get_sample_value(
            "vllm:request_queue_time_seconds_count", _labels(registry)
        )
        for labels, registry in series.registries
        if labels.get("leg") in ("prefill", "whole")
    }
    assert {name for name, value in queued.items() if value} == ({leg} if leg else set())


def test_a_scrape_counts_every_step_and_every_output(series: EngineSeries) -> None:
    """More steps than are applied together, and the rest of them at the scrape."""
    logger = series.logger_class(InstanceId("d0"), lambda _: None)(None)
    for number in range(100):
        stats = SchedulerStats(num_running_reqs=number)
        stats.prefix_cache_stats.queries = 3 * (number % 2)
        iteration = an_iteration(Leg.WHOLE)
        iteration.by_leg[Leg.WHOLE].num_preempted_reqs = 1
        logger.record(stats, iteration)
    logger.record(None, an_iteration(Leg.WHOLE))  # outputs without a step
    found: dict[str, float] = {}
    for _, registry in series.registries:
        samples = (sample for family in registry.collect() for sample in family.samples)
        for sample in samples:
            found[sample.name] = found.get(sample.name, 0.0) + sample.value
    assert found["vllm:num_requests_running"] == 99
    assert found["vllm:prefix_cache_queries_total"] == 150
    assert found["vllm:num_preemptions_total"] == 100
    assert found["vllm:iteration_tokens_total_count"] == 100
    assert found["vllm:iteration_tokens_total_sum"] == 100 * (2 + 10)
    assert found["vllm:generation_tokens_total"] == 101 * 2
    assert found["vllm:prompt_tokens_total"] == 101 * 10
    assert found["vllm:inter_token_latency_seconds_count"] == 101
    assert found["vllm:request_success_total"] == 101


def test_an_engine_that_has_ended_runs_no_requests(series: EngineSeries) -> None:
    d0 = InstanceId("d0")
    stats = SchedulerStats(num_running_reqs=4, num_waiting_reqs=2, kv_cache_usage=0.5)
    series.logger_class(d0, lambda _: None)(None).record(stats, None)
    gauges = {"vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc"}
    assert gauges <= counted(series)[""]
    series.engine_ended(d0)
    assert not gauges & counted(series)[""]
    series.forget(d0)
    series.engine_ended(d0)


def _labels(registry: CollectorRegistry) -> dict[str, str]:
    for family in registry.collect():
        for sample in family.samples:
            if sample.name == "vllm:request_queue_time_seconds_count":
                return dict(sample.labels)
    raise AssertionError


def test_the_registry_of_the_process_has_none_of_them(series: EngineSeries) -> None:
    assert not [one for one in REGISTRY.collect() if one.name.startswith("vllm:")]


def test_the_kv_cache_of_an_engine_is_that_of_its_latest_start(series: EngineSeries) -> None:
    """Routers and `banaserve plan probe` read the sizes of caches there, as of vLLM's server."""
    for blocks in ("10", "20"):
        cache = SimpleNamespace(metrics_info=lambda n=blocks: {"num_gpu_blocks": n})
        logger = series.logger_class(InstanceId("d0"), lambda _: None)(Config(cache_config=cache))
        logger.log_engine_initialized()
    [found] = [
        one.labels
        for _, registry in series.registries
        for family in registry.collect()
        for one in family.samples
        if one.name == "vllm:cache_config_info"
    ]
    assert found == {"num_gpu_blocks": "20", "engine": "0"}
