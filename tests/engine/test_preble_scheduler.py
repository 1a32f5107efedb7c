"""vLLM's scheduler with Preble's order: the order is Preble's, everything else vLLM's."""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest

from banaserve.base import models
from banaserve.base.errors import UserError

pytest.importorskip("vllm")
pytestmark = pytest.mark.e2e

BLOCK = 16
NUM_BLOCKS = 200


@cache
def model_config() -> Any:
    from vllm.config import ModelConfig

    found = models.resolve(models.PACKAGED, None, lambda line: print(line, file=sys.stderr))
    return ModelConfig(model=found.path_or_id, dtype="float32", max_model_len=1024)


def config_of(policy: str = "fcfs", is_async: bool = False, max_requests: int = 1) -> Any:
    from vllm.config import CacheConfig, SchedulerConfig, VllmConfig

    cache_config = CacheConfig(block_size=BLOCK, enable_prefix_caching=True)
    cache_config.num_gpu_blocks = NUM_BLOCKS
    config = VllmConfig(
        model_config=model_config(),
        scheduler_config=SchedulerConfig(
            max_num_batched_tokens=256,
            max_num_seqs=max_requests,
            max_model_len=1024,
            is_encoder_decoder=False,
            enable_chunked_prefill=True,
            async_scheduling=False,
            policy=policy,
        ),
        cache_config=cache_config,
    )
    # Afterwards: on a CPU the configuration switches it off.
    config.scheduler_config.async_scheduling = is_async
    return config


def scheduler_of(config: Any, kind: type[Any], num_blocks: int = NUM_BLOCKS) -> Any:
    import torch
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    config.cache_config.num_gpu_blocks = num_blocks
    spec = FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32)
    kv = KVCacheConfig(
        num_blocks=num_blocks,
        kv_cache_tensors=[],
        kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
    )
    return kind(
        vllm_config=config,
        kv_cache_config=kv,
        structured_output_manager=StructuredOutputManager(config),
        block_size=BLOCK,
        log_stats=False,
    )


@dataclass
class Engine:
    """A scheduler whose model says 7.

    Attributes:
        began: Names in the order in which requests first ran.
        said: Tokens of each.
    """

    scheduler: Any
    hasher: Any
    requests: dict[str, Any] = field(default_factory=dict)
    began: list[str] = field(default_factory=list)
    said: dict[str, list[int]] = field(default_factory=dict)
    num_preemptions: int = 0

    def ask(self, name: str, prompt: list[int], num_output: int = 2) -> None:
        from vllm.sampling_params import SamplingParams
        from vllm.v1.request import Request

        sampling = SamplingParams(max_tokens=num_output, ignore_eos=True)
        age_s = float(len(self.requests))
        request = Request(name, prompt, sampling, None, age_s, block_hasher=self.hasher)
        self.requests[name] = request
        self.said[name] = []
        self.scheduler.add_request(request)

    def step(self) -> None:
        from vllm.v1.outputs import ModelRunnerOutput

        plan = self.scheduler.schedule()
        self.num_preemptions += len(plan.preempted_req_ids or ())
        names = list(plan.num_scheduled_tokens)
        self.began += [name for name in names if name not in self.began]
        sampled = []
        for name in names:
            request = self.requests[name]
            whole = request.num_computed_tokens >= request.num_tokens
            sampled.append([7 + len(self.said[name])] if whole else [])
            self.said[name] += sampled[-1]
        places = {name: place for place, name in enumerate(names)}
        self.scheduler.update_from_output(plan, ModelRunnerOutput(names, places, sampled))

    def run(self) -> None:
        for _ in range(500):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        raise AssertionError("requests are left")


def engine_of(kind: str = "preble", num_blocks: int = NUM_BLOCKS, **more: Any) -> Engine:
    from vllm.v1.core.sched.scheduler import Scheduler

    from banaserve.engine.compat import kv_cache as compat
    from banaserve.engine.preble_scheduler import PrebleScheduler

    config = config_of(**more)
    scheduler = scheduler_of(config, Scheduler if kind == "vllm" else PrebleScheduler, num_blocks)
    return Engine(scheduler, compat.block_hasher(config, BLOCK))


def text(seed: int, length: int) -> list[int]:
    return [1000 * seed + place % 997 for place in range(length)]


PREFIX = text(1, 160)


def crowd(engine: Engine) -> None:
    """One is served; then a cold one waits before two of which half and nearly all is cached."""
    engine.ask("first", PREFIX)
    engine.run()
    engine.ask("running", text(2, 64), num_output=4)
    engine.step()
    engine.ask("cold", text(3, 160))
    engine.ask("half", PREFIX[:80] + text(4, 80))
    engine.ask("hot", PREFIX + text(5, 8))


def test_what_is_cached_goes_first() -> None:
    engine = engine_of()
    crowd(engine)
    engine.run()
    assert engine.began == ["first", "running", "hot", "half", "cold"]


def test_vllm_takes_them_as_they_came() -> None:
    """A guard: the order above is not what comes about anyway."""
    engine = engine_of("vllm")
    crowd(engine)
    engine.run()
    assert engine.began == ["first", "running", "cold", "half", "hot"]


def test_a_prefix_that_is_cached_while_it_waits_counts() -> None:
    engine = engine_of()
    engine.ask("running", PREFIX, num_output=4)
    engine.ask("cold", text(3, 160))
    engine.ask("same prefix", PREFIX + text(5, 8))
    engine.run()
    assert engine.began == ["running", "same prefix", "cold"]


def test_a_cold_one_is_not_starved_by_those_that_keep_coming() -> None:
    engine = engine_of()
    engine.ask("first", PREFIX)
    engine.run()
    engine.ask("cold", text(3, 160))
    for number in range(60):
        engine.ask(f"hot {number}", PREFIX + text(5 + number, 8), num_output=1)
        engine.step()
    assert engine.began.index("cold") <= 12


def test_a_request_that_goes_away_while_it_waits_is_forgotten() -> None:
    from vllm.v1.request import RequestStatus

    engine = engine_of()
    crowd(engine)
    assert engine.scheduler.get_request_counts() == (1, 3)
    engine.scheduler.finish_requests(["hot", "running"], RequestStatus.FINISHED_ABORTED)
    engine.run()
    assert engine.began == ["first", "running", "half", "cold"]
    assert engine.scheduler.get_request_counts() == (0, 0)


@pytest.mark.parametrize("is_async", [False, True])
def test_everybody_gets_the_tokens_that_vllm_gives_though_memory_is_short(is_async: bool) -> None:
    said, preemptions = [], []
    for kind in ("vllm", "preble"):
        engine = engine_of(
            kind, num_blocks=12, max_requests=4, is_async=is_async and kind != "vllm"
        )
        for number in range(8):
            engine.ask(str(number), PREFIX[:48] + text(2 + number, 10), num_output=30)
        engine.run()
        said.append(engine.said)
        preemptions.append(engine.num_preemptions)
    assert said[0] == said[1]
    assert min(preemptions) > 0


def test_the_asynchronous_engine_gets_the_asynchronous_scheduler() -> None:
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler

    assert isinstance(engine_of(is_async=True).scheduler, AsyncScheduler)
    assert not isinstance(engine_of().scheduler, AsyncScheduler)


def test_priorities_of_requests_are_refused_beside_it() -> None:
    with pytest.raises(UserError, match="exclude each other"):
        engine_of(policy="priority")
