"""Closed loops of clients on simulated engines, split or aggregated."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import NamedTuple

import numpy as np

from banaserve.base.errors import UserError
from banaserve.base.types import InstanceId
from banaserve.orchestrator.control.costs.profile import load
from banaserve.sim.instances.batch import EngineLimits
from banaserve.sim.instances.engine import SimEngine
from banaserve.sim.request import SimRequest
from banaserve.sim.timeline import Timeline
from banaserve_bench.silicon.aiconfigurator import AiconfiguratorTimes
from banaserve_bench.silicon.costs import EngineConstants, MeasuredCosts
from banaserve_bench.silicon.step_times import GpuStepTimes
from benchmarks.plan.runs import EngineShape, ServedRun, Workers
from benchmarks.silicon import Floats
from benchmarks.whole_runs import Simulated

_PROFILE = load("llama-3.1-8b-h100")
"""Gives a simulated engine what step times do not need."""
_REQUESTS_PER_CLIENT = 10
_LEAST_LENGTH = 0.8
_STEP_TOKENS = 8192
_MEMORY_FRACTION = 0.9
_CHECKPOINTS = {"fp4": "nvidia/DeepSeek-V3.1-NVFP4"}
"""Checkpoints of precisions that the model's own config.json does not have."""


class KnownEngine(NamedTuple):
    """Operators of an engine, and the tokens that fit into its KV cache."""

    times: GpuStepTimes
    kv_tokens: int


class Way(NamedTuple):
    """Time of a request outside of engines' steps, in seconds, and per prompt token."""

    fixed_s: float = 0.0
    token_s: float = 0.0


class Constants(NamedTuple):
    """Constants of a stack: of its engines, and of requests' ways to each kind of system."""

    engine: EngineConstants
    aggregated: Way = Way()
    split: Way = Way()

    def way_s(self, run: ServedRun) -> float:
        """Return the time of a request of ``run`` outside of steps, for a prompt of full length."""
        way = self.split if run.is_split else self.aggregated
        return way.fixed_s + way.token_s * run.prompt_tokens


class ServedLoop:
    """Clients of simulated engines, each with one request at a time.

    Of a split, a prompt is computed by the prefill engine with the fewest prompts, and decoded by
    the decode engine with the fewest requests.
    """

    def __init__(
        self,
        run: ServedRun,
        engines: Sequence[KnownEngine],
        constants: Constants,
        slowdown: float = 1.0,
    ) -> None:
        random = np.random.default_rng(0)
        num_requests = _REQUESTS_PER_CLIENT * run.clients
        self._lengths = [
            random.integers(int(_LEAST_LENGTH * most), most + 1, num_requests).tolist()
            for most in (run.prompt_tokens, run.output_tokens)
        ]
        self._timeline = Timeline()
        self._run, self._known, self._slowdown = run, constants, slowdown
        self._parts: dict[InstanceId, Floats] = {}
        self._decoders = self._engines("d", run.engines, engines[0])
        self._entries = self._decoders
        if run.prefill is not None:
            self._entries = self._engines("p", run.prefill, engines[1])
        self._begun: dict[int, tuple[InstanceId, Floats]] = {}
        self._sent = 0
        self._ended: list[tuple[float, float, Floats]] = []

    def run(self) -> Simulated:
        """Return the means over all requests."""
        for _ in range(self._run.clients):
            self._send()
        self._timeline.run()
        ttft, tpot, parts = (np.mean(one, axis=0) for one in zip(*self._ended, strict=True))
        return Simulated(float(ttft), float(tpot), parts)

    def _engines(self, role: str, workers: Workers, known: KnownEngine) -> list[SimEngine]:
        groups = workers.shape.data_parallel
        limits = EngineLimits(
            groups * _STEP_TOKENS,
            self._run.clients,
            plans_ahead=self._known.engine.steps_in_flight > 1,
        )
        found = []
        for number in range(workers.number):
            name = InstanceId(f"{role}{number}")
            costs = MeasuredCosts(_PROFILE, known.times, self._known.engine)
            costs.slowdown = self._slowdown
            engine = SimEngine(
                name,
                self._timeline,
                costs,
                limits,
                groups * known.kv_tokens,
                self._fetch,
                self._prefilled,
                self._end,
                lambda _engine, request: None,
            )
            self._parts[name] = np.zeros(4)
            engine.observe = partial(self._observe, name)
            found.append(engine)
        return found

    def _send(self) -> None:
        number = self._sent
        prompts, outputs = self._lengths
        if number == len(prompts):
            return
        self._sent += 1
        request = SimRequest(number, self._timeline.now_s, prompts[number], outputs[number])
        self._timeline.after(self._known.way_s(self._run), self._enter, request)

    def _enter(self, request: SimRequest) -> None:
        min(self._entries, key=_load).submit(request)

    def _prefilled(self, engine: SimEngine, request: SimRequest) -> bool:
        if self._run.prefill is None:
            self._begin(engine, request)
            return True
        engine.release(request.kv_tokens)
        min(self._decoders, key=_load).submit(request)
        return False

    def _fetch(self, engine: SimEngine, request: SimRequest) -> None:
        request.first_s = self._timeline.now_s
        self._begin(engine, request)
        engine.join(request)

    def _begin(self, engine: SimEngine, request: SimRequest) -> None:
        self._begun.setdefault(request.id, (engine.name, self._parts[engine.name].copy()))

    def _observe(
        self, name: InstanceId, start_s: float, took_s: float, steps: int, batch: int, tokens: int
    ) -> None:
        known = self._known.engine
        gpu_s = took_s / self._slowdown - steps * (known.host_s + batch * known.host_request_s)
        if tokens:
            self._parts[name] += (0.0, gpu_s / known.prompt_factor, steps, steps * batch)
        else:
            self._parts[name] += (gpu_s / known.decode_factor, 0.0, steps, steps * batch)

    def _end(self, engine: SimEngine, request: SimRequest) -> None:
        gaps = max(1, request.output_tokens - 1)
        ttft_s = request.first_s - request.arrival_s
        tpot_s = (request.end_s - request.first_s) / gaps
        name, before = self._begun.pop(request.id)
        self._ended.append((ttft_s, tpot_s, (self._parts[name] - before) / gaps))
        self._send()


def _load(engine: SimEngine) -> int:
    return len(engine.waiting) + engine.num_running


def engine_of(run: ServedRun, shape: EngineShape) -> KnownEngine | None:
    """Return an engine of ``run`` as the package knows it; None if it lacks operators."""
    from aiconfigurator_core.sdk.memory import estimate_kv_cache

    model = _CHECKPOINTS.get(run.precision, run.model)
    tensor, data, experts = shape
    try:
        times = AiconfiguratorTimes(
            model, run.gpu, tensor, experts > 1, None, data_parallel=data, backend=run.backend
        )
        memory = estimate_kv_cache(
            model,
            run.gpu,
            run.backend,
            "current",
            max_num_tokens=_STEP_TOKENS,
            max_batch_size=run.clients,
            memory_fraction_kind="of_free" if run.backend == "trtllm" else "of_total",
            memory_fraction_value=_MEMORY_FRACTION,
            tp_size=tensor,
            attention_dp_size=data,
            moe_tp_size=tensor * data // experts,
            moe_ep_size=experts,
        )
    except (UserError, ValueError):
        return None
    return KnownEngine(times, int(memory["total_kv_size_tokens"]))
