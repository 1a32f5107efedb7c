"""``bench all``: runs what it lists, tells what failed, and writes a report of the rest."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

import pytest

from banaserve_bench.results import result
from benchmarks import run_all
from benchmarks.registry import BENCHMARKS

TINY = ("--runs", "1", "--requests", "300", "--instances", "8", "--cell-size", "4")


def test_a_good_one_and_bad_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    listed = {"orchestrator": TINY, "report": (str(tmp_path / "none"),)}
    monkeypatch.setattr(run_all, "QUICK", listed)
    assert run_all.main(["--quick", "--out", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "report: exit code 2:" in told
    assert result.read(tmp_path / "orchestrator.json").name == "orchestrator"
    assert "## orchestrator" in (tmp_path / "report.md").read_text()


def test_without_time_nothing_runs(tmp_path: Path) -> None:
    [outcome] = run_all.run_all({"orchestrator": TINY}, tmp_path, budget_s=0)
    assert (outcome.is_good, outcome.words) == (False, "not run: no time left")


@pytest.mark.parametrize("name", run_all.QUICK)
def test_quick_options_are_options(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help exits before anything runs, but not before what stands before it is understood."""
    main = import_module(BENCHMARKS[name].module).main
    with pytest.raises(SystemExit) as left:
        main([*run_all.QUICK[name], "--json", str(tmp_path / "x"), "--help"])
    assert left.value.code == 0
    assert "usage" in capsys.readouterr().out
