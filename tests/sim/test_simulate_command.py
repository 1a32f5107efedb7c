"""`banaserve simulate`: what it prints, writes and returns."""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path

import pytest

from banaserve.cli.main import main
from banaserve.orchestrator.control.costs import profile
from banaserve.sim.system import KINDS
from banaserve_bench.simulation import case

pytestmark = pytest.mark.deep


def test_listing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--list"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in (*case.names(), *profile.names(), *KINDS))


def test_a_case_says_that_it_is_simulated_and_what_was_reached(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert main(["simulate", "death-in-migration"]) == 0
    shown = capsys.readouterr().out
    assert "simulated" in shown
    assert "opt-13b-a100" in shown
    assert "error of step times: unknown\n" in shown
    assert "move layers 32:40 from d0 to p0" in shown
    assert "reached  seed 7" in shown
    parts = [part.splitlines() for part in shown.split("\n\n")[1:]]
    headings = [part[0].split() for part in parts]
    assert headings[1:] == [
        ["system", "at", "step"],
        ["goal", "run", "system", "figure", "value"],
    ]
    # Numbers end where the names of their systems do.
    assert len({len(line) for line in parts[0]}) == 1


def test_a_goal_that_is_missed_is_exit_code_1(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (case.BUILT_IN / "bursts.toml").read_text()
    path = tmp_path / "hard.toml"
    path.write_text(text.replace("duration_s = 120", "duration_s = 5").replace("1.1", "0.1"))
    assert main(["simulate", str(path)]) == 1
    assert "missed   seed 4" in capsys.readouterr().out


def test_json_over_two_seeds(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--rps", "4", "--duration", "10", "--seeds", "2", "--seed", "5", "--json"]
    assert main(["simulate", "alpaca", *options]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["time"].startswith("simulated")
    assert [run["seed"] for run in told["runs"]] == [5, 6]
    assert list(told["runs"][0]["systems"]) == ["colocated", "static", "elastic"]


def test_a_chrome_trace_has_every_step_and_request(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    options = ["--rps", "4", "--duration", "20", "--system", "static", "--json"]
    assert main(["simulate", "longbench", *options, "--chrome-trace", str(path)]) == 0
    [run] = json.loads(capsys.readouterr().out)["runs"]
    result = run["systems"]["static"]
    written = json.loads(path.read_text())
    assert written["otherData"]["time"].startswith("simulated")
    events = written["traceEvents"]
    begun = [e for e in events if e["ph"] == "b" and e["name"] == "first token"]
    assert len(begun) == result["num_finished"]
    spans = [e for e in events if e["ph"] == "X"]
    rows = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert {rows[e["tid"]] for e in spans} == {"p0", "p1", "d0", "d1"}
    assert {rows[e["tid"]][0] for e in spans if e["name"] == "prefill"} == {"p"}
    assert sum(e["args"]["prompt_tokens"] for e in spans) == sum(
        e["args"]["prompt_tokens"] for e in begun
    )
    for row in rows:
        ends = sorted((e["ts"], e["ts"] + e["dur"]) for e in spans if e["tid"] == row)
        assert all(a[1] <= b[0] + 0.01 for a, b in pairwise(ends))


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "give a case, a trace or a dataset"),
        (["bursts", "--seeds", "0"], "seeds is 0"),
        (["TRACE", "--seeds", "2"], "--seeds has no effect on a trace's own arrivals: leave it"),
        (["alpaca", "--rps", "2", "--pd", "4"], "give P:D"),
        (["alpaca", "--rps", "2", "--pd", "1:1", "--instances", "4"], "one of --pd, --instances"),
        (["alpaca", "--rps", "2", "--pd", "1:1", "--colocated", "4"], "one of --pd, --instances"),
        (["alpaca", "--rps", "2", "--instances", "1"], "the static system needs 2 instances"),
        (["bursts", "--instances", "4"], "--instances has no effect on a case"),
        (["alpaca", "--rps", "2", "--slo-ttft", "0"], "ttft_s is 0"),
        (["alpaca", "--rps", "many"], "--rps"),
        (["alpaca", "--rps", "0.001", "--duration", "1"], "no request arrives with seed 0"),
        (["bursts", "--chrome-trace", "/nowhere/x.json"], "cannot write /nowhere/x.json"),
        (["bursts", "--polic", "repaired"], "--policy"),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    argv: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_text('{"t": 0, "input_length": 1, "output_length": 1}\n')
    argv = [str(trace) if word == "TRACE" else word for word in argv]
    assert main(["simulate", *argv]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out
