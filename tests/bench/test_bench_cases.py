"""The simulator's cases on paced engines: what is asked of a server, and what is read of it."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from banaserve.base.errors import UserError
from banaserve.contracts.control_api import DecisionRecord, StepRecord, WantedStep
from banaserve.orchestrator.control.move_policies import registry
from banaserve.orchestrator.control.move_policies.options import RepairedOptions
from banaserve.orchestrator.control.turn import ControlLimits as ControlLimits
from banaserve.orchestrator.planner.loop.loop import ControllerOptions
from banaserve.orchestrator.planner.loop.time_scaling import dilated
from banaserve.orchestrator.planner.options import ElasticOptions
from banaserve.sim import case as scenarios
from banaserve.sim.report.result import LatencyLimits
from banaserve.sim.request import SimRequest
from banaserve.sim.system import preset
from banaserve_bench.loadgen.client import RequestRecord
from banaserve_bench.results import result
from banaserve_bench.results.result import ModelledTime
from banaserve_bench.serving.timeline import decisions_of
from benchmarks import cases
from benchmarks.cases import CaseRequest, figures_of, options_of, sampled


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


def test_a_system_as_options_of_serve() -> None:
    moved = preset("banaserve", prefill=3, decode=1, migration_options={"rho": 2})
    options = options_of(moved, "opt-13b-a100", 4.0, Path("log"))
    words = " ".join(options)
    for wanted in (
        "--pace opt-13b-a100 --dilate 4",
        "--pd 3:1",
        "--orchestrator on --orchestrator-policy repaired",
        "--orchestrator-option rho=2",
        "--decision-log log",
    ):
        assert wanted in words
    assert "--migration-overlap" not in words
    waiting = preset("banaserve", prefill=3, decode=1, overlap_fraction=0.0)
    words = " ".join(options_of(waiting, "opt-13b-a100", 4.0, Path("log")))
    assert "--migration-overlap 1" in words
    still = options_of(preset("static", prefill=2, decode=2), "opt-13b-a100", 1.0, Path("log"))
    assert "--orchestrator off" in " ".join(still)
    with pytest.raises(UserError, match="apart"):
        options_of(preset("colocated", colocated=4), "opt-13b-a100", 1.0, Path("log"))


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


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["prefill-flod"], "prefill-flood"),
        (["slow-instance"], "only the simulator"),
        (["--system", "statik"], "static"),
        (["--dilate", "0"], "0.1 or more"),
        (["--sample", "0"], "1 or more"),
    ],
)
def test_what_cannot_be_run_is_said_before_anything_starts(argv: list[str], said: str) -> None:
    with pytest.raises(UserError, match=said):
        cases.main(argv)


def test_another_benchmarks_file_is_not_overwritten(tmp_path: Path) -> None:
    other = tmp_path / "other.json"
    when = datetime(2026, 1, 1, tzinfo=UTC)
    one = result.result("router", seed=0, options={}, started_at=when, figures={})
    result.write(one, other)
    with pytest.raises(UserError, match="bench router"):
        cases.main(["prefill-flood", "--json", str(other)])


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


def test_what_a_file_holds_of_other_cases_is_kept_and_judged_again(tmp_path: Path) -> None:
    """Everything but the servers, which the caller has run."""
    path = tmp_path / "cases.json"
    when = datetime(2026, 1, 1, tzinfo=UTC)
    given = cases._parse(["prefill-flood", "--json", str(path), "--phase-s", "20"])
    told = dict.fromkeys((*scenarios.METRICS, *cases._UNITS), 1.0)
    time = ModelledTime("opt-13b-a100", "a fit", 4.0, 100, 1, 0.001)
    told = {**told, "modelled_time": msgspec.to_builtins(time), "decisions": []}
    found = {
        "prefill-flood": {
            "load": {},
            "paced": {"banaserve": told},
            "simulated": {"banaserve": told},
            "goals": {"paced": [], "simulated": []},
        }
    }
    record = cases._result(given, when, found)
    result.write(record, path)
    assert cases._kept(path) == found
    again = cases._result(
        given, when, {**cases._kept(path), "decode-flood": found["prefill-flood"]}
    )
    result.deliver(again, path)
    assert again.modelled_time == [time, time]
    assert set(cases._kept(path)) == {"prefill-flood", "decode-flood"}
    assert again.figures["decode-flood.banaserve.goodput_fraction"].median == 1.0
