"""`banaserve bench NAME`: which benchmark runs, and what is said where none does."""

from __future__ import annotations

import subprocess
import sys
from types import ModuleType

import pytest

from banaserve.base.errors import UserError
from banaserve_bench.command import Benchmark, bench_command, run_benchmark
from benchmarks.location import ROOT, environment
from benchmarks.registry import BENCHMARKS


def test_the_rest_goes_to_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("banaserve_made_up_benchmark")
    module.main = lambda argv: len(argv)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(BENCHMARKS, "made-up", Benchmark(module.__name__, "None?"))
    assert run_benchmark(["made-up", "--json", "out.json"], BENCHMARKS, "x") == 2


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_listing(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_benchmark(argv, BENCHMARKS, "python -m benchmarks") == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in BENCHMARKS)


def test_unknown_benchmark() -> None:
    with pytest.raises(UserError, match=r"unknown benchmark: handoff .*did you mean handover\?"):
        run_benchmark(["handoff"], BENCHMARKS, "python -m benchmarks")


def test_the_command_of_a_wheel_has_what_needs_no_checkout(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert bench_command([]) == 0
    assert "make bench NAME=" in capsys.readouterr().out
    with pytest.raises(UserError, match="unknown benchmark: handover "):
        bench_command(["handover"])


def test_benchmarks_are_imported_only_when_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "benchmarks.handover", raising=False)
    run_benchmark([], BENCHMARKS, "python -m benchmarks")
    assert "benchmarks.handover" not in sys.modules


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_wrong_option_is_one_line(name: str) -> None:
    program = r"(banaserve bench|python -m benchmarks)"
    with pytest.raises(UserError, match=rf"{name}: .*\(see {program} {name} --help\)$"):
        run_benchmark([name, "--no-such-option"], BENCHMARKS, "python -m benchmarks")


@pytest.mark.parametrize("given", ["0", "-1", "many", "1.5"])
def test_nothing_is_measured_no_times(given: str) -> None:
    with pytest.raises(UserError, match=r"--runs.*give a whole number above 0"):
        run_benchmark(["handover", f"--runs={given}"], BENCHMARKS, "python -m benchmarks")


def test_a_command_says_in_one_line_what_is_wrong() -> None:
    command = [sys.executable, "-m", "benchmarks", "orchestrator", "--runs", "0"]
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr.splitlines() == [
        "banaserve: runs and requests are at least 1, sim-runs at least 0"
    ]
