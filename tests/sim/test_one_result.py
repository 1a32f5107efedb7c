"""Command, cases, benchmark and library give one result for the same system and load."""

from __future__ import annotations

import json
import textwrap
from dataclasses import replace
from pathlib import Path

import pytest

from banaserve.cli.main import main
from banaserve.cli.serve.command_line import parse_serve_argv
from banaserve.engine.migration_settings import MigrationSettings
from banaserve.sim.system import KINDS, System, following, preset
from banaserve_bench.simulation import case
from banaserve_bench.simulation.job import AskedSystem, job
from banaserve_bench.simulation.run import simulate
from benchmarks.elastic.cells import LoadCell, cells
from benchmarks.elastic.runs import elastic_system
from benchmarks.simulate_paper import runs as paper

DOCUMENT = Path(__file__).parents[2] / "docs/simulator.md"


@pytest.fixture(scope="module")
def own_case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The example of the documents, a hundredth as long and with all arrivals at one time."""
    text = DOCUMENT.read_text().partition('    name = "mine"')
    block = textwrap.dedent(text[1] + text[2].partition("\nKeys of a system")[0])
    path = tmp_path_factory.mktemp("case") / "mine.toml"
    path.write_text(block.replace("duration_s = 600", "duration_s = 8"))
    return path


@pytest.mark.room
def test_the_documented_case_runs_as_the_library_does(
    own_case: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["simulate", str(own_case), "--json"])
    [told] = json.loads(capsys.readouterr().out)["runs"]
    assert code in (0, 1)
    assert list(told["systems"]) == ["colocated", "elastic", "three_to_one"]
    read = case.read(str(own_case))
    for name, system in read.systems.items():
        own = simulate(read.profile, system, read.requests(1), read.limits)
        assert json.loads(json.dumps(own)) == told["systems"][name], name


@pytest.mark.room
def test_the_elastic_policy_serves_what_fixed_roles_do_not(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Three prefill instances idle and one decode instance is full, unless somebody looks."""

    def goodput(policy: str) -> float:
        main(["simulate", "decode-flood", "--system", "banaserve", "--policy", policy, "--json"])
        [told] = json.loads(capsys.readouterr().out)["runs"]
        return float(told["systems"]["banaserve"]["goodput_fraction"])

    assert goodput("elastic") > 0.95 > 0.3 > goodput("still")


def test_the_benchmarks_elastic_system_is_the_commands() -> None:
    cell: LoadCell = cells(1, traced=False)[0]
    ttft_s, tpot_s = cell.service_limits
    asked = AskedSystem(
        target="alpaca",
        rps=1,
        instances=4,
        profile=cell.profile,
        slo_ttft_s=ttft_s,
        slo_tpot_s=tpot_s,
    )
    commands = job(asked).systems["elastic"]
    assert replace(commands, kind="banaserve", cache="none") == elastic_system(cell, 4)


def test_colocated_instances_of_the_command_are_the_librarys(
    capsys: pytest.CaptureFixture[str],
) -> None:
    load = ["alpaca", "--rps", "4", "--duration", "5", "--seed", "3"]
    assert main(["simulate", *load, "--colocated", "2", "--json"]) == 0
    [told] = json.loads(capsys.readouterr().out)["runs"]
    planned = job(AskedSystem(target="alpaca", rps=4, duration_s=5))
    system = preset("colocated", colocated=2)
    own = simulate(planned.profile, system, planned.requests(3), planned.limits)
    assert told["systems"] == {"colocated": json.loads(json.dumps(own))}


@pytest.mark.parametrize("reading", paper.READINGS)
@pytest.mark.parametrize("figure", paper.FIGURES, ids=lambda figure: str(figure.number))
def test_the_systems_compared_with_the_paper_are_the_commands(
    figure: paper.PaperFigure, reading: str
) -> None:
    limits = paper.limits_of(figure, reading)
    asked = AskedSystem(
        target=figure.dataset,
        rps=1,
        profile=figure.profile,
        slo_ttft_s=limits.ttft_s,
        slo_tpot_s=limits.tpot_s,
        systems=KINDS,
    )
    commands = job(asked).systems
    assert set(paper.SYSTEMS) == set(commands)
    for name in paper.SYSTEMS:
        assert paper.system_of(figure, reading, name) == commands[name], name


@pytest.mark.room
def test_a_run_for_the_paper_is_the_commands(capsys: pytest.CaptureFixture[str]) -> None:
    figure, reading, rate, seed = paper.FIGURES[3], "reference", 1, 1
    limits = paper.limits_of(figure, reading)
    options = {
        "rps": rate,
        "duration": paper.WARM_S + paper.MEASURED_S,
        "max-output-tokens": paper.MAX_OUTPUT_TOKENS,
        "seed": seed,
        "profile": figure.profile,
        "slo-ttft": limits.ttft_s,
        "slo-tpot": limits.tpot_s,
    }
    words = [f"--{name}={value}" for name, value in options.items()]
    words += [f"--system={name}" for name in paper.SYSTEMS]
    assert main(["simulate", figure.dataset, *words, "--json"]) == 0
    [told] = json.loads(capsys.readouterr().out)["runs"]
    for name in paper.SYSTEMS:
        own = paper.measure(paper.PaperRun(figure.number, reading, name, rate, seed))
        assert own["total_s"] == told["systems"][name]["total_s"], name


@pytest.mark.parametrize("kind", KINDS)
def test_steps_overlap_as_engines_let_them_unless_told(kind: str) -> None:
    assert MigrationSettings().overlap > 1
    assert preset(kind, colocated=2).overlap_fraction is None
    assert preset(kind, colocated=2, overlap_fraction=0.0).overlap_fraction == 0.0


def test_roles_that_it_begins_with_are_kept() -> None:
    planned = job(AskedSystem(target="alpaca", rps=1, prefill=3, decode=1))
    names = [name for name, _ in planned.systems["elastic"].roles()]
    assert sorted(names) == ["d0", "p0", "p1", "p2"]
    assert planned.systems["colocated"].colocated == 4
    both = job(AskedSystem(target="alpaca", rps=1, instances=5))
    assert both.systems["elastic"].colocated == both.systems["colocated"].colocated == 5
    assert (both.systems["static"].prefill, both.systems["static"].decode) == (2, 3)


@pytest.mark.parametrize("limits", [{}, {"ttft_s": 2.0, "tpot_s": 0.05}])
def test_the_simulated_elastic_system_is_what_serve_runs(limits: dict[str, float]) -> None:
    options = [f"--slo-{name[:-2]}={value}" for name, value in limits.items()]
    served = parse_serve_argv(["--model", "m", "--instances", "2", *options])
    control = served.orchestrator
    system: System = following(
        preset("elastic", colocated=2), "opt-13b-a100", modules="layers", **limits
    )
    assert system.migration == control.policy
    assert system.routing == system.migration_options["routing"] == served.routing_policy
    assert system.control_s == control.interval_s
    assert system.control_limits.concurrent == control.concurrent
    assert system.control_limits.per_minute == control.per_minute
    assert system.rebalances == served.rebalances
    assert system.migration_options["modules"] == "layers"
