"""Closed loops of clients on simulated engines, split or aggregated.

A client has one request at a time, and sends ten in the mean, with lengths between 0.8 and 1 of the
largest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import numpy as np

from banaserve.base.types import InstanceId
from banaserve.orchestrator.control.costs.profile import load
from banaserve.sim.instances.batch import EngineLimits
from banaserve.sim.instances.engine import SimEngine
from banaserve.sim.request import SimRequest
from banaserve.sim.timeline import Timeline
from banaserve_bench.silicon.costs import EngineConstants, MeasuredCosts
from banaserve_bench.silicon.linear import Floats
from banaserve_bench.silicon.step_times import GpuStepTimes

_PROFILE = load("llama-3.1-8b-h100")
"""Gives a simulated engine what step times do not need."""
_REQUESTS_PER_CLIENT = 10
_LEAST_LENGTH = 0.8
LAUNCHES = 4
"""Place of the time of steps that take ``launch_s``, among the parts of ``Simulated``."""


class RunConstants(NamedTuple):
    """Constants of a run's engines, and of a request's way outside of their steps.

    Attributes:
        engine: Constants of the engines that decode.
        prefill: Constants of the engines that only compute prompts.
        way_s: Time of a request outside of steps, in seconds.
        way_token_s: Increase of that time with each token of the prompt, in seconds.
    """

    engine: EngineConstants = EngineConstants()
    prefill: EngineConstants = EngineConstants()
    way_s: float = 0.0
    way_token_s: float = 0.0


class LoopEngines(NamedTuple):
    """Equal engines.

    Attributes:
        kv_tokens: Number of tokens that fit into the KV cache of each.
        step_tokens: Maximum number of tokens of a step.
    """

    number: int
    times: GpuStepTimes
    kv_tokens: int
    step_tokens: int


class Simulated(NamedTuple):
    """Means of a simulated run in seconds, and what tokens wait for in the mean.

    Attributes:
        first_parts: Parts of a first token's time: GPU time of steps that only decode, of other
            steps, steps, requests in them, time of steps that take ``launch_s``; then 1 and the
            prompt's tokens, for its way.
        parts: The first five parts, of each later token's time.
    """

    ttft_s: float
    tpot_s: float
    first_parts: Floats
    parts: Floats


@dataclass(slots=True)
class _Entered:
    """Time at which a request came to an engine, and the parts of the engine's steps until then."""

    time_s: float
    parts: Floats


class ClosedLoop:
    """Clients of simulated engines.

    Of a split, a prompt is computed by the prefill engine with the fewest requests, and decoded by
    the decode engine with the fewest.

    Args:
        lengths: Largest number of prompt tokens, and of output tokens.
        prefill: Engines that only compute prompts; None if all do both.
        slowdown: Factor of all step times.
    """

    def __init__(
        self,
        clients: int,
        lengths: Sequence[int],
        engines: LoopEngines,
        prefill: LoopEngines | None,
        constants: RunConstants,
        slowdown: float = 1.0,
    ) -> None:
        random = np.random.default_rng(0)
        num_requests = _REQUESTS_PER_CLIENT * clients
        self._prompts, self._outputs = (
            random.integers(int(_LEAST_LENGTH * most), most + 1, num_requests).tolist()
            for most in lengths
        )
        self._timeline = Timeline()
        self._clients, self._known, self._slowdown = clients, constants, slowdown
        self._parts: dict[InstanceId, Floats] = {}
        self._entered: dict[InstanceId, dict[int, _Entered]] = {}
        self._first_parts: dict[int, Floats] = {}
        self._decoders = self._engines("d", engines, constants.engine)
        self._entries = self._decoders
        if prefill is not None:
            self._entries = self._engines("p", prefill, constants.prefill)
        self._begun: dict[int, tuple[InstanceId, Floats]] = {}
        self._sent = 0
        self._ended: list[tuple[float, float, Floats, Floats]] = []

    def run(self) -> Simulated:
        """Return the means over all requests."""
        for _ in range(self._clients):
            self._send()
        self._timeline.run()
        ttft, tpot, first, parts = (np.mean(one, axis=0) for one in zip(*self._ended, strict=True))
        return Simulated(float(ttft), float(tpot), first, parts)

    def _engines(
        self, role: str, engines: LoopEngines, constants: EngineConstants
    ) -> list[SimEngine]:
        limits = EngineLimits(
            engines.step_tokens, self._clients, plans_ahead=constants.steps_in_flight > 1
        )
        found = []
        for number in range(engines.number):
            costs = MeasuredCosts(_PROFILE, engines.times, constants)
            costs.slowdown = self._slowdown
            engine = SimEngine(
                InstanceId(f"{role}{number}"),
                self._timeline,
                costs,
                limits,
                engines.kv_tokens,
                self._fetch,
                self._prefilled,
                self._end,
                lambda _engine, request: None,
            )
            self._parts[engine.name] = np.zeros(5)
            self._entered[engine.name] = {}
            engine.observe = partial(self._observe, engine.name, constants)
            found.append(engine)
        return found

    def _send(self) -> None:
        number = self._sent
        if number == len(self._prompts):
            return
        self._sent += 1
        prompt, output = self._prompts[number], self._outputs[number]
        request = SimRequest(number, self._timeline.now_s, prompt, output)
        way_s = self._known.way_s + self._known.way_token_s * prompt
        self._timeline.after(way_s, self._enter, request)

    def _enter(self, request: SimRequest) -> None:
        engine = min(self._entries, key=_num_requests)
        entered = _Entered(self._timeline.now_s, self._parts[engine.name].copy())
        self._entered[engine.name][request.id] = entered
        engine.submit(request)

    def _prefilled(self, engine: SimEngine, request: SimRequest) -> bool:
        # After a preemption, a prompt is computed again.
        if (entered := self._entered[engine.name].pop(request.id, None)) is not None:
            way = (1.0, request.prompt_tokens)
            waited = self._parts[engine.name] - entered.parts
            self._first_parts[request.id] = np.concatenate([waited, way])
        if self._entries is self._decoders:
            self._begin(engine, request)
            return True
        engine.release(request.kv_tokens)
        min(self._decoders, key=_num_requests).submit(request)
        return False

    def _fetch(self, engine: SimEngine, request: SimRequest) -> None:
        # The decode engine sends the first token, too.
        request.first_s = self._timeline.now_s
        self._begin(engine, request)
        engine.join(request)

    def _begin(self, engine: SimEngine, request: SimRequest) -> None:
        self._begun.setdefault(request.id, (engine.name, self._parts[engine.name].copy()))

    def _observe(
        self,
        name: InstanceId,
        known: EngineConstants,
        start_s: float,
        took_s: float,
        steps: int,
        batch: int,
        tokens: int,
    ) -> None:
        gpu_s = took_s / self._slowdown - steps * (known.host_s + batch * known.host_request_s)
        parts = np.array([0.0, 0.0, steps, steps * batch, 0.0])
        if not tokens:
            parts[0] = gpu_s / known.decode_factor
        elif gpu_s > known.launch_s * (1 + 1e-9):
            parts[1] = gpu_s / known.prompt_factor
        else:
            parts[LAUNCHES] = known.launch_s
        self._parts[name] += parts
        for entered in self._entered[name].values():
            # Of the step under way when a request enters, it waits for the rest.
            if entered.time_s > start_s:
                entered.parts += parts * min(1.0, (entered.time_s - start_s) / took_s)

    def _end(self, engine: SimEngine, request: SimRequest) -> None:
        gaps = max(1, request.output_tokens - 1)
        ttft_s = request.first_s - request.arrival_s
        tpot_s = (request.end_s - request.first_s) / gaps
        name, before = self._begun.pop(request.id)
        parts = (self._parts[name] - before) / gaps
        self._ended.append((ttft_s, tpot_s, self._first_parts.pop(request.id), parts))
        self._send()


def _num_requests(engine: SimEngine) -> int:
    return len(engine.waiting) + engine.num_running
