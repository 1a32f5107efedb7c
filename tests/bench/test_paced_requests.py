"""Requests of cases to paced engines, and what is read of their records."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from banaserve.contracts.control_api import DecisionRecord, StepRecord, WantedStep
from banaserve.orchestrator.control.move_policies import registry
from banaserve.orchestrator.control.move_policies.options import RepairedOptions
from banaserve.orchestrator.control.turn import ControlLimits as ControlLimits
from banaserve.orchestrator.planner.loop.loop import ControllerOptions
from banaserve.orchestrator.planner.loop.time_scaling import dilated
from banaserve.orchestrator.planner.options import ElasticOptions
from banaserve.sim.request import SimRequest
from banaserve.sim.result import LatencyLimits
from banaserve_bench.loadgen.client import RequestRecord
from banaserve_bench.serving.simulated_requests import CaseRequest, figures_of
from banaserve_bench.serving.timeline import decisions_of
from banaserve_bench.simulation import case as scenarios
from benchmarks.paced_requests import sampled


def record(due_s: float, first_s: float, end_s: float, tokens: int) -> RequestRecord:
    gap_s = (end_s - first_s) / max(1, tokens - 1)
    return RequestRecord(
        id="r",
        due_at_s=due_s,
        sent_at_s=due_s + 0.1,
        first_token_at_s=first_s,
        ended_at_s=end_s,
        token_at_s=[first_s + n * gap_s for n in range(tokens)],
        completion_tokens=tokens,
    )


def test_figures_are_those_of_the_simulator_in_modelled_seconds() -> None:
    good = record(10.0, 14.0, 22.0, 11)  # 1 s to the first token, 0.2 s each after it
    late = record(14.0, 30.0, 34.0, 11)
    lost = RequestRecord(id="l", due_at_s=12.0, sent_at_s=12.0, error="gone")
    figures = figures_of([good, late, lost], 4.0, LatencyLimits(ttft_s=2.0, tpot_s=0.21))
    assert figures["goodput_fraction"] == figures["finished_fraction"] / 2 == pytest.approx(1 / 3)
    assert (figures["ttft_p99_s"], figures["ttft_mean_s"]) == (4.0, 2.5)
    assert figures["tpot_p99_s"] == pytest.approx(0.2)
    assert figures["total_s"] == 6.0
    assert figures["output_tokens_per_s"] == pytest.approx(22 / 6)
    assert set(figures) < set(scenarios.METRICS) | {
        "num_requests",
        "num_finished",
        "ttft_p50_s",
        "tpot_p50_s",
        "e2e_p50_s",
    }


def test_prompts_are_drawn_by_request_and_seed() -> None:
    first, again = (CaseRequest.of(SimRequest(7, 1.5, 40, 9), 3) for _ in range(2))
    other = CaseRequest.of(SimRequest(8, 1.5, 40, 9), 3)
    assert (first, first.at_s, len(first.prompt), first.output_tokens) == (again, 1.5, 40, 9)
    assert first.prompt != other.prompt


@pytest.mark.parametrize(("total", "count", "places"), [(9, 3, [0, 3, 6]), (2, 5, [0, 1])])
def test_a_sample_is_spread_evenly(total: int, count: int, places: list[int]) -> None:
    assert sampled(total, count) == places


def test_decisions_that_began_something_as_they_were_last_written(tmp_path: Path) -> None:
    log = tmp_path / "log"
    assert decisions_of(log, 0.0, 2.0) == []
    switch = WantedStep("switch d1 from decode to prefill", "role", 2.0, 8.0, 10.0, {})
    begun = DecisionRecord(3, 108.0, "on", "repaired", 0.5, True, "", {}, {}, [switch], [])
    held = DecisionRecord(4, 109.0, "on", "repaired", 0.5, True, "", {}, {}, [], [])
    lines = [msgspec.json.encode(begun), msgspec.json.encode(held)]
    switch.result = StepRecord("done", "", 3.0, 0, 0.0, 0, False)
    lines.append(msgspec.json.encode(begun))
    log.write_bytes(b"\n".join(lines) + b"\n")
    [told] = decisions_of(log, 100.0, 2.0)
    assert (told["at_s"], told["gap"]) == (4.0, 0.5)
    assert [(s["ending"], s["cost_s"], s["took_s"]) for s in told["steps"]] == [("done", 1.0, 1.5)]


@pytest.mark.parametrize("policy", registry.names())
def test_a_dilated_controller_is_as_patient_as_the_cluster(policy: str) -> None:
    has_link = policy not in ("elastic", "still")
    section = {"link_sync_s": 0.5, "timeout_factor": 3.0} if has_link else {}
    options = ControllerOptions(policy=policy, section=section, limits=ControlLimits(per_minute=9))
    slow = dilated(options, 4.0)
    assert (slow.interval_s, slow.limits.per_minute) == (8.0, 9)
    assert (slow.limits.smoothing_s, slow.limits.minute_s) == (20.0, 240.0)
    registry.make(policy, **slow.section)
    if policy == "repaired":
        assert slow.section["dwell_s"] == 4 * RepairedOptions().dwell_s
        assert (slow.section["timeout_factor"], slow.section["link_sync_s"]) == (3.0, 0.5)
        assert "link_bytes_per_s" not in slow.section
        assert "ttft_budget_s" not in slow.section
    if policy == "elastic":
        assert slow.section["window_s"] == 4 * ElasticOptions().window_s
        assert slow.section["ttft_s"] == 0.0
    if policy == "published":
        assert slow.section["rho_per_s"] == 0.0
    assert dict(dilated(options, 1.0).section).items() >= section.items()
