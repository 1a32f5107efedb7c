"""benchmarks/simulate_paper: what is counted, and what the report says of it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from banaserve.sim.request import SimRequest
from banaserve_bench.results import result
from banaserve_bench.results.result import Result
from benchmarks.simulate_paper import command
from benchmarks.simulate_paper import report as simulate_paper_report
from benchmarks.simulate_paper import runs as simulate_paper_runs


@pytest.fixture
def paper() -> Any:
    return simulate_paper_runs


@pytest.fixture
def report() -> Any:
    return simulate_paper_report


@pytest.mark.parametrize(
    ("first_s", "end_s", "output", "expected"),
    [
        (70.0, 80.0, 11, 11.0),
        (10.0, 20.0, 11, 0.0),
        (50.0, 70.0, 21, 10.0),
        (170.0, 190.0, 21, 11.0),
        (40.0, 200.0, 161, 120.0),
        (70.0, 70.0, 1, 1.0),
        (180.0, 180.0, 1, 0.0),
    ],
)
def test_tokens_that_come_within_the_window(
    paper: Any, first_s: float, end_s: float, output: int, expected: float
) -> None:
    request = SimRequest(0, 0.0, 10, output)
    request.first_s, request.end_s = first_s, end_s
    assert paper._in_window(request) == pytest.approx(expected)


@pytest.mark.deep
def test_a_run_below_saturation_serves_what_is_offered(paper: Any) -> None:
    found = {
        name: paper.measure(paper.PaperRun(9, "reference", name, 2, 1)) for name in paper.SYSTEMS
    }
    for values in found.values():
        assert values["tokens_per_s"] == pytest.approx(values["offered_tokens_per_s"], rel=0.1)
    ratio = found["banaserve"]["tokens_per_s"] / found["static"]["tokens_per_s"]
    assert ratio == pytest.approx(1.0, abs=0.01)


def test_limits_are_the_same_multiple_of_a_request_alone_in_every_cell(paper: Any) -> None:
    one_step_s = {8: 0.0201, 9: 0.0201, 10: 0.0226, 11: 0.0212}
    for figure in paper.FIGURES:
        for reading in paper.READINGS:
            limits = paper.limits_of(figure, reading)
            assert limits.tpot_s == pytest.approx(5 * one_step_s[figure.number], rel=0.01)
            system = paper.system_of(figure, reading, "elastic")
            told = {"ttft_s": limits.ttft_s, "tpot_s": limits.tpot_s}
            assert system.routing_options == told
            assert told.items() <= system.migration_options.items()
    [short, long] = [paper.limits_of(paper.FIGURES[n], "reference").ttft_s for n in (1, 3)]
    assert long > 10 * short, "LongBench's prompts are forty times as long"


def test_goodput_is_of_what_came_after_the_warm_up_within_the_limits(paper: Any) -> None:
    calm, full = (
        paper.measure(paper.PaperRun(11, "reference", "static", rate, 1)) for rate in (1, 20)
    )
    assert calm["goodput_fraction"] > 0.95
    assert full["goodput_fraction"] < 0.01


def made_up(paper: Any, most: dict[str, float]) -> list[tuple[Any, dict[str, float]]]:
    """Systems that serve what is offered up to a most, 50 tokens a request."""
    runs = []
    for run in paper.all_runs():
        offered = 50.0 * run.rate_per_s
        served = min(offered, most.get(run.system, 600.0) + run.seed)
        found = {
            "tokens_per_s": served,
            "offered_tokens_per_s": offered,
            "goodput_fraction": served / offered,
            "total_s": 180.0,
            "latency_s": 1.0,
        }
        runs.append((run, found))
    return runs


def recorded(runs: list[tuple[Any, dict[str, float]]]) -> Result:
    return command.result_of(command.measurement_of(Path()), runs)


def test_the_report_tells_what_is_reached_and_what_is_missing(paper: Any, report: Any) -> None:
    most = {"static": 400.0, "colocated": 2000.0, "elastic": 800.0}
    text = re.sub(" +", " ", report.markdown(recorded(made_up(paper, most))))
    assert "Simulated: step times come from a cost model" in text
    assert (
        "Figure 8, capped, over DistServe: 1.50 at most, the paper has up to 1.2. Reached." in text
    )
    assert "Figure 9, capped, over DistServe: 1.50 at most, the paper has up to 3.9. From" in text
    assert "static is saturated; it serves 403 tokens/s at most and banaserve 603" in text
    assert "At 20 requests a second colocated still serves what is offered" in text
    assert "| 9: OPT-13B, alpaca | reference | 1.00 to 1.50 | 1.00 to 1.99 | 2.8 to 3.9 |" in text
    # Of 50, 300, 600 and 1,000 tokens/s: all, all, all but for static, and what is served of it.
    limits = "0.102 s | 100 ms"
    shares = "1.00, 1.00, 1.00, 1.00 | 1.00, 1.00, 0.67, 0.40 | 1.00, 1.00, 1.00, 0.60"
    assert (
        f"| 9: OPT-13B, alpaca | reference | {limits} | {shares} | 1.00, 1.00, 1.00, 0.80" in text
    )
    assert "for goodput and not for throughput" in text
    assert "| 1 | banaserve | 50 ± " in text
    record = recorded(made_up(paper, most))
    assert "latency, capped answers" in report.picture(record, paper.FIGURES[0])
    figures = report.figures_of(made_up(paper, {}))
    assert figures["fig11_capped_banaserve_20rps_over_static"][0] == [1.0] * 5
    assert figures["fig8_reference_static_1_3_20rps_tokens_per_s"][1] == "tokens/s"


def test_what_was_run_before_is_not_run_again(
    paper: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = paper.PaperRun(9, "reference", "static", 1, 1)
    path = tmp_path / "paper.json"
    assert command.kept(path) == {}
    monkeypatch.setattr(result, "commit", lambda: ("a" * 40, False))
    measurement = command.measurement_of(path)
    measurement.keep(command.unfinished(measurement, {run: {"total_s": 1.5}}))
    assert command.kept(path) == {run: {"total_s": 1.5}}
    monkeypatch.setattr(result, "commit", lambda: ("b" * 40, False))
    assert command.kept(path) == {}
