"""One behaviour, two engines: the simulated one plans the steps that vLLM's scheduler plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from banaserve.orchestrator.control.costs.profile import load as load_profile
from banaserve.orchestrator.control.costs.steps import StepCosts
from banaserve.sim.instances.batch import EngineLimits
from banaserve.sim.instances.engine import SimEngine
from banaserve.sim.request import SimRequest
from banaserve.sim.timeline import Timeline
from engine_invariants import check_engine
from engine_steps import LOADS, WATERMARK_FRACTION, Load, Recorded, record

FILE = Path(__file__).with_name("engine_steps.json")


def recorded(name: str) -> Recorded:
    entry = json.loads(FILE.read_text())[name]
    pairs = ([tuple(pair) for pair in entry[key]] for key in ("steps", "finished"))
    return Recorded(*pairs, entry["num_preemptions"])


def simulated(load: Load) -> Recorded:
    """What the simulated engine does with ``load``; requests come at the ends of steps."""
    timeline = Timeline()
    steps: list[tuple[int, int]] = []
    finished: list[tuple[int, int]] = []
    limits = EngineLimits(load.step_tokens, load.max_requests, WATERMARK_FRACTION, load.plans_ahead)
    engine = SimEngine(
        "e0",
        timeline,
        StepCosts(load_profile("opt-13b-a100")),
        limits,
        load.kv_tokens,
        lambda engine, request: None,
        lambda engine, request: True,
        lambda engine, request: finished.append((request.id, len(steps) - 1)),
        lambda engine, request: None,
    )
    coming = [
        (step, SimRequest(number, 0.0, prompt, output))
        for number, (prompt, output, step) in enumerate(load.requests)
    ]

    def take(step: int) -> None:
        for due, request in coming:
            if due == step:
                engine.waiting.append(request)

    def observe(start_s: float, took_s: float, count: int, batch: int, tokens: int) -> None:
        steps.append((batch, tokens))
        take(len(steps))

    # A run of steps would hide those within it.
    engine._to_next_end = lambda: 1  # type: ignore[method-assign]
    engine.observe = observe
    take(0)
    engine.resize(load.kv_tokens)
    timeline.run()
    check_engine(engine)
    return Recorded(steps, finished, engine.num_preemptions)


@pytest.mark.parametrize("load", LOADS, ids=lambda load: load.name)
def test_the_simulated_engine_plans_the_steps_that_were_recorded(load: Load) -> None:
    assert simulated(load) == recorded(load.name)


def test_the_loads_preempt_chunk_and_wait() -> None:
    """A guard: without these the recording would prove little."""
    found = [recorded(load.name) for load in LOADS]
    assert sum(entry.num_preemptions for entry in found) >= 2
    assert any(batch and tokens for entry in found for batch, tokens in entry.steps)


@pytest.mark.e2e
@pytest.mark.parametrize(
    "name", ["and computes again in chunks", "a crowd", "no more requests than allowed, ahead"]
)
def test_the_recording_is_what_vllm_does(name: str) -> None:
    load = next(load for load in LOADS if load.name == name)
    assert record(load) == recorded(name)
