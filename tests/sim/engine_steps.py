"""The steps of vLLM's own scheduler for a few small loads, to hold the simulated engine to.

``python tests/sim/engine_steps.py > tests/sim/engine_steps.json`` records them: the real
scheduler with real KV blocks plans every step, and only the model is left out, since the tokens
that it samples change no plan. A block is one token, so that memory is counted as the simulator
counts it.
"""

from __future__ import annotations

import json
import sys
from collections import deque
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any


@dataclass(frozen=True)
class Load:
    """Requests for one engine.

    Attributes:
        requests: Prompt tokens, output tokens and the number of finished steps after which each
            of them comes.
        plans_ahead: True if a step is planned while the one before it runs (async scheduling).
    """

    name: str
    step_tokens: int
    max_requests: int
    kv_tokens: int
    requests: Sequence[tuple[int, int, int]]
    plans_ahead: bool = False


@dataclass(frozen=True)
class Recorded:
    """What came of a load.

    Attributes:
        steps: For each step its decoding requests and its prompt tokens.
        finished: Requests in the order of their ends, each with the step that ended it.
        num_preemptions: Requests that lost their KV.
    """

    steps: Sequence[tuple[int, int]]
    finished: Sequence[tuple[int, int]]
    num_preemptions: int


_LOADS = (
    Load("one prompt in chunks", 32, 8, 1000, [(100, 5, 0)]),
    Load("prompts share a step", 64, 8, 1000, [(40, 4, 0), (40, 4, 0), (40, 4, 0)]),
    Load("who decodes goes first", 32, 8, 1000, [(20, 20, 0), (100, 4, 3), (10, 6, 4)]),
    Load("no more requests than allowed", 64, 2, 1000, [(10, 9, 0), (10, 3, 0), (10, 4, 0)]),
    Load(
        "the first in the queue holds up the others",
        64,
        8,
        100,
        [(60, 9, 0), (60, 3, 1), (5, 3, 2)],
    ),
    Load("the last that came is preempted", 64, 8, 60, [(20, 25, 0), (20, 25, 0)]),
    Load("and computes again in chunks", 16, 8, 60, [(20, 25, 0), (20, 25, 0), (5, 4, 6)]),
    Load("one token each", 64, 8, 1000, [(10, 1, 0), (20, 1, 0), (200, 1, 1)]),
    Load(
        "a crowd",
        48,
        4,
        150,
        [(30, 12, 0), (25, 20, 0), (50, 8, 2), (10, 30, 3), (70, 6, 5), (15, 15, 5), (40, 9, 20)],
    ),
)
# The simulated engine preempts when a step begins, also if it plans ahead: in the crowd, with KV
# that the step before has freed, which vLLM does not know yet.
LOADS = (
    *_LOADS,
    *(replace(load, name=f"{load.name}, ahead", plans_ahead=True) for load in _LOADS[:-1]),
)


def record(load: Load) -> Recorded:
    """Lets vLLM's scheduler plan every step of ``load``."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.sched.output import SchedulerOutput
    from vllm.v1.outputs import ModelRunnerOutput
    from vllm.v1.request import Request

    scheduler = _scheduler(load)
    requests: dict[str, Request] = {}
    steps: list[tuple[int, int]] = []
    finished: list[tuple[int, int]] = []
    planned: deque[tuple[SchedulerOutput, ModelRunnerOutput]] = deque()
    preemptions = done = 0
    while len(finished) < len(load.requests):
        for number, (prompt, output, step) in enumerate(load.requests):
            if step <= done and str(number) not in requests:
                sampling = SamplingParams(max_tokens=output, ignore_eos=True)
                request = Request(str(number), [number + 1] * prompt, sampling, None)
                requests[str(number)] = request
                scheduler.add_request(request)
        before = {name: (r.num_computed_tokens, _known(r)) for name, r in requests.items()}
        plan = scheduler.schedule()
        tokens = plan.num_scheduled_tokens
        preemptions += len(plan.preempted_req_ids or ())
        decoding = {name for name in tokens if _is_decoding(*before[name], requests[name])}
        if tokens:
            others = sum(n for name, n in tokens.items() if name not in decoding)
            steps.append((len(decoding), others))
        names = list(tokens)
        sampled = [[7] if before[n][0] + tokens[n] >= before[n][1] else [] for n in names]
        places = {name: place for place, name in enumerate(names)}
        planned.append((plan, ModelRunnerOutput(names, places, sampled)))
        if load.plans_ahead and len(planned) < 2:
            continue
        plan, output_of_step = planned.popleft()
        scheduler.update_from_output(plan, output_of_step)
        if plan.num_scheduled_tokens:
            ended = [name for name in plan.num_scheduled_tokens if requests[name].is_finished()]
            finished += [(int(name), done) for name in ended]
            done += 1
    return Recorded(steps, finished, preemptions)


def _known(request: Any) -> int:
    """Return the tokens that a request will have after the steps that are planned."""
    return int(request.num_tokens + request.num_output_placeholders)


def _is_decoding(computed: int, known: int, request: Any) -> bool:
    """Whether a request that had ``computed`` of ``known`` tokens gets one after its last."""
    return computed == known - 1 and known > request.num_prompt_tokens


def _scheduler(load: Load) -> Any:
    import torch
    from vllm.config import CacheConfig, ModelConfig, SchedulerConfig, VllmConfig
    from vllm.v1.core.sched.async_scheduler import AsyncScheduler
    from vllm.v1.core.sched.scheduler import Scheduler
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from banaserve.base import models

    model = models.resolve(models.PACKAGED, None, lambda line: print(line, file=sys.stderr))
    limits = SchedulerConfig(
        max_num_batched_tokens=load.step_tokens,
        max_num_seqs=load.max_requests,
        max_model_len=512,
        is_encoder_decoder=False,
        enable_chunked_prefill=True,
        async_scheduling=load.plans_ahead,
        watermark=WATERMARK_FRACTION,
    )
    cache = CacheConfig(block_size=1, enable_prefix_caching=False)
    config = VllmConfig(
        model_config=ModelConfig(model=model.path_or_id, dtype="float32", max_model_len=512),
        scheduler_config=limits,
        cache_config=cache,
    )
    # One block more: vLLM keeps the first for padding.
    blocks = load.kv_tokens + 1
    cache.num_gpu_blocks = blocks
    spec = FullAttentionSpec(block_size=1, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], spec)]
    kind = AsyncScheduler if load.plans_ahead else Scheduler
    return kind(
        config,
        KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups),
        StructuredOutputManager(config),
        block_size=1,
    )


WATERMARK_FRACTION = 0.01
"""As the simulated engine's."""


if __name__ == "__main__":
    found = {load.name: asdict(record(load)) for load in LOADS}
    lines = [f"  {json.dumps(name)}: {json.dumps(steps)}" for name, steps in found.items()]
    print("{\n" + ",\n".join(lines) + "\n}")
