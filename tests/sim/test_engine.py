"""The simulated engine: times by hand, macro-steps against single steps, invariants."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from banaserve.orchestrator.control.costs.profile import load
from banaserve.orchestrator.control.costs.steps import StepCosts, run_s, steps_within
from banaserve.sim.instances.batch import EngineLimits
from banaserve.sim.instances.engine import SimEngine
from banaserve.sim.request import SimRequest
from banaserve.sim.timeline import Timeline
from depth import num_examples, seeds
from engine_invariants import check_engine

PROFILE = load("opt-13b-a100")


class OneStepAtATime(SimEngine):
    """The same engine without runs of steps: what the runs must equal."""

    def _to_next_end(self) -> int:
        super()._to_next_end()
        return 1


class Bench:
    """One engine that prefills and decodes, or only decodes what it fetches."""

    def __init__(
        self,
        kind: type[SimEngine] = SimEngine,
        limits: EngineLimits | None = None,
        kv_tokens: int = 66_144,
        fetch_s: float = 0.01,
    ) -> None:
        self.timeline = Timeline()
        self.done: list[SimRequest] = []
        self._fetch_s = fetch_s
        self.engine = kind(
            "e0",
            self.timeline,
            StepCosts(PROFILE),
            limits or EngineLimits(),
            kv_tokens,
            self._fetch,
            lambda engine, request: True,
            lambda engine, request: self.done.append(request),
            lambda engine, request: None,
        )

    def _fetch(self, engine: SimEngine, request: SimRequest) -> None:
        self.timeline.after(self._fetch_s, engine.join, request)

    def add(self, *requests: SimRequest) -> None:
        for request in requests:
            self.timeline.at(request.arrival_s, self.engine.submit, request)

    def run(self) -> list[SimRequest]:
        self.timeline.run()
        check_engine(self.engine)
        return self.done


def fetched(number: int, arrival_s: float, prompt: int, output: int) -> SimRequest:
    """A request whose prompt was computed elsewhere, its first token out."""
    request = SimRequest(number, arrival_s, prompt, output)
    request.to_compute, request.kv_tokens, request.generated = 0, prompt, 1
    request.first_s = arrival_s
    return request


def test_one_request_by_hand() -> None:
    """Prefill of 1,000 tokens, then four steps of one request over 1,000 to 1,003 tokens."""
    bench = Bench()
    bench.add(SimRequest(0, 1.0, 1000, 5))
    [request] = bench.run()
    assert request.first_s == pytest.approx(1.0 + 0.127132)
    steps_s = 4 * (0.01993 + 0.00003851) + 6.269e-7 * (1000 + 1001 + 1002 + 1003)
    assert request.end_s == pytest.approx(request.first_s + steps_s)
    assert bench.engine.used_tokens == 0


def test_a_long_prompt_is_computed_in_chunks() -> None:
    """2,048 tokens a step at most: 2,048 and 952; the pairs add up to 3,000 squared."""
    bench = Bench()
    bench.add(SimRequest(0, 0.0, 3000, 1))
    [request] = bench.run()
    assert request.end_s == pytest.approx(2 * 0.0181 + 3000 * 0.10191e-3 + 3000**2 * 7.122e-9)
    assert bench.engine.num_steps == 2


def test_a_large_batch_has_its_own_coefficients() -> None:
    costs = StepCosts(PROFILE)
    small_s, _, _ = costs.decode_run(94, 10_000)
    large_s, growth_s, work_s = costs.decode_run(95, 10_000)
    assert small_s == pytest.approx(0.01993 + 6.269e-3 + 94 * 0.03851e-3)
    assert large_s == pytest.approx(0.007166 + 5.798e-3 + 95 * 0.15831e-3)
    assert growth_s == pytest.approx(95 * 5.798e-7)
    assert work_s == pytest.approx(large_s - 0.007166)


def test_prompts_slow_down_those_who_decode() -> None:
    """A mixed step has one fixed part and both kinds of work."""
    step_s, work_s = StepCosts(PROFILE).mixed_s(500, 500**2, 10, 3000)
    expected_s = 500 * 0.10191e-3 + 500**2 * 7.122e-9 + 3000 * 6.269e-7 + 10 * 0.03851e-3
    assert work_s == pytest.approx(expected_s)
    assert step_s == pytest.approx(0.01993 + expected_s)


def test_what_bends_the_costs() -> None:
    costs = StepCosts(PROFILE)
    plain_s, growth_s, _ = costs.decode_run(10, 3000)
    costs.slowdown, costs.relief, costs.guest_share, costs.hop_s = 3.0, 0.2, 0.25, 0.001
    bent_s, bent_growth_s, _ = costs.decode_run(10, 3000)
    assert bent_s == pytest.approx(plain_s * 3 * 0.8 * 1.25 + 0.001)
    assert bent_growth_s == pytest.approx(growth_s * 3)


@given(st.floats(1e-3, 1), st.floats(0, 1e-2), st.integers(1, 5000), st.floats(0, 1))
@settings(max_examples=num_examples(50))
def test_steps_within_counts_the_step_under_way(
    first_s: float, growth_s: float, steps: int, part: float
) -> None:
    elapsed_s = run_s(first_s, growth_s, steps - 1)
    elapsed_s += part * 0.999 * (run_s(first_s, growth_s, steps) - elapsed_s) + 1e-9
    assert steps_within(first_s, growth_s, elapsed_s) in (steps, steps + 1)
    inside_s = run_s(first_s, growth_s, steps) - 0.5 * first_s
    assert steps_within(first_s, growth_s, inside_s) == steps


def mixed_load(seed: int, tight: bool) -> list[SimRequest]:
    draws = random.Random(seed)
    at_s, requests = 0.0, []
    for number in range(60):
        at_s += draws.expovariate(8.0)
        prompt = draws.randint(1, 900)
        output = draws.randint(2, 400 if tight else 80)
        make: Any = fetched if draws.random() < 0.4 else SimRequest
        requests.append(make(number, at_s, prompt, output))
    return requests


@pytest.mark.parametrize("tight", [False, True])
@pytest.mark.parametrize("seed", seeds(4, 4))
def test_runs_of_steps_equal_single_steps(seed: int, tight: bool) -> None:
    """With little memory too, where requests are preempted and computed again."""
    results, events = [], []
    for kind in (SimEngine, OneStepAtATime):
        bench = Bench(kind, EngineLimits(512, 24), 4000 if tight else 66_144)
        bench.add(*mixed_load(seed, tight))
        done = bench.run()
        assert len(done) == 60
        assert (bench.engine.num_preemptions > 0) is tight
        results.append(
            [(r.id, r.num_preemptions, r.generated, r.first_s, r.end_s) for r in done]
            + [(-1, bench.engine.num_steps, 0, *bench.engine.busy())]
        )
        events.append(bench.timeline.num_events)
    for run, single in zip(*results, strict=True):
        assert run == pytest.approx(single, rel=1e-9)
    assert events[0] < events[1]


@given(st.integers(0, 10_000), st.integers(1500, 6000), st.integers(1, 30))
@settings(max_examples=num_examples(15))
def test_invariants_hold_after_every_event(seed: int, kv_tokens: int, max_requests: int) -> None:
    bench = Bench(SimEngine, EngineLimits(256, max_requests), kv_tokens)
    bench.add(*mixed_load(seed, tight=True))
    while bench.timeline.next_s is not None:
        bench.timeline.step()
        check_engine(bench.engine)
        assert len(bench.engine.decoding) <= max_requests
        assert bench.engine.used_tokens <= kv_tokens
    assert sorted(r.id for r in bench.done) == list(range(60))
    assert all(r.generated == r.output_tokens for r in bench.done)
    assert bench.engine.used_tokens == 0


def test_memory_that_shrinks_preempts_and_memory_that_grows_admits() -> None:
    bench = Bench(kv_tokens=4000)
    bench.add(*(fetched(n, 0.0, 900, 300) for n in range(4)), fetched(4, 0.0, 900, 300))
    bench.timeline.run(until_s=1.0)
    assert (len(bench.engine.decoding), len(bench.engine.waiting)) == (4, 1)
    bench.engine.resize(2500)
    bench.timeline.run(until_s=1.2)
    assert len(bench.engine.decoding) == 2
    assert bench.engine.num_preemptions == 2
    bench.engine.resize(9000)
    assert len(bench.run()) == 5


def test_lost_kv_is_computed_again_and_every_token_comes_once() -> None:
    bench = Bench()
    bench.add(*(SimRequest(n, 0.0, 300, 200) for n in range(5)))
    bench.timeline.run(until_s=2.0)
    assert len(bench.engine.decoding) == 5
    bench.engine.lose_kv()
    done = bench.run()
    assert [r.generated for r in done] == [200] * 5
    assert {r.num_preemptions for r in done} == {1}


def test_a_dead_engine_gives_back_its_requests_with_the_tokens_they_got() -> None:
    tokens = []
    for kind in (SimEngine, OneStepAtATime):
        bench = Bench(kind, EngineLimits(512, 3))
        bench.add(*(SimRequest(n, 0.0, 300, 200) for n in range(5)))
        bench.timeline.run(until_s=2.0)
        lost = bench.engine.kill()
        assert [r.id for r in lost] == [0, 1, 2, 3, 4]
        tokens.append([r.generated for r in lost])
        assert bench.run() == []
        assert bench.engine.used_tokens == 0
    assert tokens[0] == tokens[1]
    assert tokens[0][0] > 80
    assert tokens[0][3:] == [0, 0]


def test_a_stall_delays_the_next_step() -> None:
    ends = []
    for stall_s in (0.0, 0.5):
        bench = Bench()
        bench.engine.stall(stall_s)
        bench.add(SimRequest(0, 0.0, 100, 10))
        ends.append(bench.run()[0].end_s)
    assert ends[1] - ends[0] == pytest.approx(0.5)


def test_a_fetched_prefix_is_not_computed_and_hides_behind_the_rest() -> None:
    """900 of 1,000 tokens fetched in 29.5 ms; 100 computed on top of them in 29.6 ms.

    What nothing hides is one layer of the shorter one.
    """
    bench = Bench()
    request = SimRequest(0, 0.0, 1000, 1)
    request.cached_tokens, request.to_compute = 900, 100
    bench.add(request)
    bench.run()
    pairs = 100 * (100 + 1800)
    compute_s = 0.0181 + 100 * 0.10191e-3 + pairs * 7.122e-9
    fetch_s = 900 * bench.engine.costs.fetch_token_s
    assert request.end_s == pytest.approx(compute_s + fetch_s / 40)
    slow = Bench()
    slow.engine.costs.fetch_token_s = 1e-3
    again = SimRequest(0, 0.0, 1000, 1)
    again.cached_tokens, again.to_compute = 900, 100
    slow.add(again)
    slow.run()
    assert again.end_s == pytest.approx(0.9 + compute_s / 40)
