"""`bench orchestrator`: it runs and writes what it says; no time is judged here."""

from __future__ import annotations

from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs.profile import load as load_profile
from banaserve.orchestrator.control.move_policies import registry
from banaserve_bench.results import result
from benchmarks import orchestrator
from benchmarks.orchestrator import EVEN, RANDOM, cluster, load, system


def test_a_small_run_writes_every_figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(orchestrator, "_SIZES", (8, 16))
    path = tmp_path / "orchestrator.json"
    argv = ["--json", str(path), "--runs", "2", "--requests", "200"]
    argv += ["--instances", "16", "--processes", "2"]
    assert orchestrator.main(argv) == 0
    record = result.read(path)
    assert record.figures["decision_ms_8"].unit == "ms"
    assert len(record.figures["decision_even_ms_16"].samples) == 2
    assert record.figures["decision_growth_n_log_n"].unit == "times n log n"
    assert record.figures["simulated_requests_per_s"].median > 0
    finished = record.raw["last_simulation"]["num_finished"]
    assert finished == record.raw["last_simulation"]["num_requests"]
    assert "simulated_requests_per_cpu_s: " in capsys.readouterr().out


def test_what_the_decisions_are_about() -> None:
    facts = load_profile("opt-13b-a100").facts
    policy = registry.make("repaired")
    assert len(policy.plan(cluster(64, 1, RANDOM, facts)).steps) == 4
    assert not policy.plan(cluster(64, 1, EVEN, facts)).steps
    assert cluster(64, 1, RANDOM, facts) == cluster(64, 1, RANDOM, facts)


def test_the_load_has_about_as_many_requests_as_asked() -> None:
    assert sum(1 for _ in load(100.0, 2000, 3)) == pytest.approx(2000, rel=0.1)


def test_what_makes_no_sense_is_refused() -> None:
    with pytest.raises(UserError, match="give an even number"):
        system(7, 8)
    with pytest.raises(UserError, match="at least 1"):
        orchestrator.main(["--runs", "0"])
    with pytest.raises(UserError, match="would lack a role"):
        orchestrator.main(["--instances", "10", "--cell-size", "3"])
