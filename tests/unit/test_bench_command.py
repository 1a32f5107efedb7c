"""`banaserve bench NAME`: which benchmark runs, and what is said where none does."""

from __future__ import annotations

import sys
from types import ModuleType

import pytest

from banaserve.cli.bench import BENCHMARKS, Benchmark, bench_command
from banaserve.errors import UserError


def test_the_rest_goes_to_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("banaserve_made_up_benchmark")
    module.main = lambda argv: len(argv)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(BENCHMARKS, "made-up", Benchmark(module.__name__, "None?"))
    assert bench_command(["made-up", "--json", "out.json"]) == 2


@pytest.mark.parametrize("argv", [[], ["--help"], ["-h"]])
def test_listing(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert bench_command(argv) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in BENCHMARKS)


def test_unknown_benchmark() -> None:
    with pytest.raises(UserError, match=r"unknown benchmark: handoff .*did you mean handover\?"):
        bench_command(["handoff"])


def test_benchmarks_are_imported_only_when_they_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "banaserve.bench.handover", raising=False)
    bench_command([])
    assert "banaserve.bench.handover" not in sys.modules


@pytest.mark.parametrize("name", BENCHMARKS)
def test_a_wrong_option_is_one_line(name: str) -> None:
    with pytest.raises(
        UserError, match=rf"^bench {name}: .*\(see banaserve bench {name} --help\)$"
    ):
        bench_command([name, "--no-such-option"])


@pytest.mark.parametrize("given", ["0", "-1", "many", "1.5"])
def test_nothing_is_measured_no_times(given: str) -> None:
    with pytest.raises(UserError, match=r"--runs.*give a whole number above 0"):
        bench_command(["stall", f"--runs={given}"])
