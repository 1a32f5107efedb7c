"""From options to systems and load: what is asked is what is simulated, and nothing is ignored."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import pytest

from banaserve.base.errors import UserError
from banaserve_bench.simulation.job import AskedSystem, job, parse_lengths
from banaserve_bench.simulation.workload import Arrivals

TRACE = "".join(
    f'{{"timestamp": {1000 * i}, "input_length": {100 + i}, "output_length": 5}}\n'
    for i in range(11)
)

LENGTHS = {"prompt_lengths": parse_lengths("9"), "output_lengths": parse_lengths("9")}


@pytest.fixture
def trace(tmp_path: Path) -> str:
    path = tmp_path / "trace.jsonl"
    path.write_text(TRACE)
    return str(path)


def test_a_case_with_another_policy_and_fewer_systems() -> None:
    planned = job(AskedSystem(target="prefill-flood", systems=["banaserve"], policy="published"))
    assert [(n, s.migration) for n, s in planned.systems.items()] == [("banaserve", "published")]
    both = job(AskedSystem(target="prefill-flood", policy="published"))
    assert both.systems["static"].migration == "still"


def test_a_distribution_with_instances_and_rate() -> None:
    planned = job(AskedSystem(target="longbench", rps=5, duration_s=40, prefill=3, decode=1))
    assert list(planned.systems) == ["colocated", "static", "elastic"]
    assert planned.systems["colocated"].colocated == 4
    assert (planned.systems["static"].prefill, planned.systems["static"].decode) == (3, 1)
    requests = list(planned.requests(1))
    assert planned.expected_requests == 200
    assert len(requests) == pytest.approx(200, rel=0.25)
    most = planned.profile.model.max_context_tokens
    assert planned.about.endswith(f"% of them cut to the model's context of {most} tokens")
    assert max(r.prompt_tokens + r.output_tokens for r in requests) == most


def test_a_trace_is_stretched_to_a_rate_and_the_same_for_every_seed(trace: str) -> None:
    planned = job(AskedSystem(target=trace, rps=2.2))
    times = [request.arrival_s for request in planned.requests(1)]
    assert times == pytest.approx([i / 2 for i in range(11)])
    assert times == [request.arrival_s for request in planned.requests(2)]
    fast = job(AskedSystem(target=trace, speed=4, limit=3))
    assert [request.arrival_s for request in fast.requests(1)] == [0, 0.25, 0.5]


def test_a_log_that_begins_with_a_failure_keeps_its_times(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    failed, served = (
        f'{{"time": {at_s}, "prompt_tokens": 9, "completion_tokens": {tokens}}}\n'
        for at_s, tokens in ((1, 0), (2, 5))
    )
    path.write_text(failed + served + served.replace("2", "7", 1))
    planned = job(AskedSystem(target=str(path)))
    assert [request.arrival_s for request in planned.requests(1)] == [0, 5]
    path.write_text(failed)
    with pytest.raises(UserError, match="holds no request"):
        job(AskedSystem(target=str(path), rps=1))


def test_lengths_of_a_trace_with_arrivals_that_are_drawn(trace: str) -> None:
    planned = job(AskedSystem(target=trace, arrivals="bursts", rps=20, duration_s=50))
    requests = list(planned.requests(1))
    assert {r.prompt_tokens for r in requests} <= set(range(100, 111))
    gaps = [b.arrival_s - a.arrival_s for a, b in pairwise(requests)]
    mean = sum(gaps) / len(gaps)
    assert sum((gap - mean) ** 2 for gap in gaps) / len(gaps) > 4 * mean**2


def test_a_diurnal_rate_is_lowest_at_the_ends() -> None:
    arrivals = Arrivals(duration_s=1000, rate_per_s=10, swing_fraction=0.8)
    times = list(arrivals.times_s(Random(3)))
    assert times == sorted(times)
    assert len(times) == pytest.approx(10_000, rel=0.05)
    first, middle = (sum(a <= t < a + 100 for t in times) for a in (0, 450))
    # The rate is 2.4 a second on average in the first tenth, and 17.9 in the middle one.
    assert first == pytest.approx(246, rel=0.3)
    assert middle == pytest.approx(1787, rel=0.1)


def test_lengths_on_the_command_line() -> None:
    lengths = {"prompt_lengths": parse_lengths("500-900"), "output_lengths": parse_lengths("20")}
    planned = job(AskedSystem(rps=10, duration_s=30, **lengths))
    requests = list(planned.requests(1))
    assert {r.output_tokens for r in requests} == {20}
    prompts = [r.prompt_tokens for r in requests]
    assert 500 <= min(prompts) < 600 < 800 < max(prompts) <= 900
    assert planned.about == "poisson arrivals, 10 a second for 30 s"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"target": "prefil-flood"}, "did you mean prefill-flood"),
        ({"target": "prefill-flood", "rps": 3}, "--rps has no effect on a case"),
        ({"target": "prefill-flood", "prefill": 3}, "--pd has no effect"),
        ({"target": "prefill-flood", "swing_fraction": 0.5}, "--swing has no effect"),
        ({"target": "alpaca", "rps": 1, "swing_fraction": 0.5}, "--swing has no effect on poisson"),
        ({"target": "TRACE", "variation": 2.0}, "--variation has no effect on trace"),
        ({"target": "alpaca", "rps": 1, "tokenizer": Path("x")}, "tokenizer has no effect on len"),
        ({"target": "prefill-flood", "max_output_tokens": 9}, "max-output-tokens has no effect"),
        ({"target": "alpaca", "rps": 1, "limit": 9}, "limit has no effect on drawn arrivals"),
        ({"target": "prefill-flood", "systems": ["colocated"]}, "unknown system of the case"),
        ({"target": "prefill-flood", "policy": "repared"}, "did you mean repaired"),
        ({"target": "alpaca"}, "--rps"),
        ({"target": ""}, "give a case, a trace or a dataset"),
        ({"target": "", "prompt_lengths": parse_lengths("9")}, "give both --prompt-tokens"),
        ({"target": "alpaca", **LENGTHS}, "give alpaca or --prompt-tokens, not both"),
        ({"target": "", **LENGTHS}, "give the mean rate of the arrivals with --rps"),
        ({"target": "", "arrivals": "trace", **LENGTHS}, "--prompt-tokens has no arrivals"),
        ({"target": "TRACE", "tokenizer": Path("x")}, "tokenizer has no effect on a trace's own"),
        ({"target": "alpaca", "rps": 0}, "rate_per_s is 0"),
        ({"target": "alpaca", "rps": 1e307}, "requests would arrive: give at most 1e+08"),
        (
            {"target": "alpaca", "rps": 1, "arrivals": "bursts", "variation": 1e200},
            "variation is 1e+200",
        ),
        ({"target": "alpaca", "rps": 1, "speed": 2}, "speed has no effect"),
        ({"target": "alpaca", "rps": 1, "arrivals": "burst"}, "did you mean bursts"),
        ({"target": "alpaca", "rps": 1, "arrivals": "trace"}, "alpaca has no arrivals"),
        ({"target": "alpaca", "rps": 1, "systems": ["vllm"]}, "unknown system"),
        ({"target": "alpaca", "rps": 1, "profile": "opt"}, "did you mean opt-13b-a100"),
        ({"target": "alpaca", "rps": 1, "prefill": 0, "decode": 0}, "a system needs instances"),
        (
            {"target": "alpaca", "rps": 1, "arrivals": "diurnal", "swing_fraction": 1.0},
            "swing_fraction is 1.0",
        ),
        ({"target": "alpaca", "rps": 1, "max_output_tokens": 0}, "max-output-tokens is 0"),
        ({"target": "none.jsonl"}, "cannot read none.jsonl"),
        ({"target": "TRACE", "duration_s": 3}, "duration has no effect"),
        ({"target": "TRACE", "rps": 3, "speed": 3}, "give one of rps and speed"),
        ({"target": "TRACE", "speed": 0}, "speed is 0"),
        ({"target": "TRACE", "speed": 1e-10}, "the load lasts 1e+11 s: give at most 1e+07"),
        ({"target": "alpaca", "rps": 1e-9, "duration_s": 1e10}, "the load lasts 1e+10 s"),
        ({"target": "TRACE", "limit": 0}, "limit is 0"),
        ({"target": "TRACE", "limit": 1, "rps": 3}, "lasts longer than 0 s"),
    ],
)
def test_what_makes_no_sense_is_said(options: dict[str, Any], words: str, trace: str) -> None:
    target = trace if options["target"] == "TRACE" else options["target"]
    with pytest.raises(UserError) as failure:
        job(AskedSystem(**{**options, "target": target}))
    assert words in str(failure.value)
