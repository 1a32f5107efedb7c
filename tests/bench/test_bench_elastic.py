"""Figures and variants of the benchmark of the elastic policy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from banaserve_bench.results import result
from benchmarks.elastic import command as script
from benchmarks.elastic import paced
from benchmarks.elastic.cells import LoadCell, load_of, sample
from benchmarks.elastic.command import PARTS
from benchmarks.elastic.figures import figures
from benchmarks.elastic.paced_cells import PacedCell
from benchmarks.elastic.runs import CellOutcome, Outcome, elastic_system, saturation_per_s

CELL = LoadCell("opt-13b-a100", "alpaca capped", "steady", 0.9, 0, 1)


def test_a_trace_is_stretched_to_the_rate(tmp_path: Path) -> None:
    lines = [f"2023-11-16 18:17:{n // 2:02}.0,{1000 + n},{10 + n}" for n in range(100)]
    trace = tmp_path / "AzureLLMInferenceTrace_mine.csv"
    trace.write_text("\n".join(["TIMESTAMP,ContextTokens,GeneratedTokens", *lines]))
    llama = LoadCell("llama-3.1-8b-h100", "azure", "steady", 0.85, 1, 1)
    assert sample(llama, 3, tmp_path).rows == [(0.0, 1000 + n, 10 + n) for n in range(3)]
    rows = load_of(llama, 0.5, tmp_path).rows
    assert [row[1:] for row in rows] == [(1000 + n, 10 + n) for n in range(60)]
    assert rows[-1][0] == pytest.approx(120.0)


@pytest.mark.parametrize("name", PARTS)
def test_each_part_can_be_left_out(name: str) -> None:
    whole, without = elastic_system(CELL, 4), elastic_system(CELL, 4, PARTS[name])
    assert whole != without
    assert elastic_system(CELL, 8, PARTS[name]).colocated == 8


def outcome(goodput: float, total_s: float = 100.0) -> Outcome:
    return Outcome(goodput, total_s, 1.0, 1.0, 1.0, 1.0)


def test_what_is_left_without_a_part() -> None:
    fixed = {f"0 prefill, 0 decode, 4 both, steps of {n}": outcome(0.5) for n in (512, 2048)}
    cells = [
        CellOutcome(CELL, 10, fixed, {"elastic": outcome(0.8), "roles": outcome(0.4)}),
        CellOutcome(CELL, 10, fixed, {"elastic": outcome(0.5), "roles": outcome(0.5)}),
    ]
    found = figures(cells)
    assert found["without_over_whole.roles"] == ([0.5, 1.0], "ratio")
    assert found["without.roles"] == ([pytest.approx((0.8 * 1.0) ** 0.5)], "ratio")


def test_a_run_that_was_broken_off_goes_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """With code that is the same, and with no other."""
    ran, file = [], tmp_path / "elastic.json"
    fixed = {f"0 prefill, 0 decode, 4 both, steps of {n}": outcome(0.5) for n in (512, 2048)}

    class Pool:
        def map(self, _run: object, chosen: Sequence[LoadCell]) -> Iterator[CellOutcome]:
            for number, cell in enumerate(chosen):
                if len(ran) == 3:
                    raise KeyboardInterrupt
                ran.append(number)
                yield CellOutcome(cell, 10, fixed, {"elastic": outcome(0.8)})

    argv = ["--cells", "5", "--json", str(file)]
    monkeypatch.setattr(script, "workers", lambda jobs: nullcontext(Pool()))
    monkeypatch.delenv("BANASERVE_DATA", raising=False)
    monkeypatch.setattr(result, "commit", lambda: ("c0ffee", False))
    with pytest.raises(KeyboardInterrupt):
        script.main(argv)
    ran.clear()
    capsys.readouterr()
    assert script.main(argv) == 0
    assert ran == [0, 1]
    said = [line.split(" ")[0] for line in capsys.readouterr().out.splitlines()]
    assert [word for word in said if word.endswith("/5")] == ["4/5", "5/5"]
    ran.clear()
    monkeypatch.setattr(result, "commit", lambda: ("decaf", False))
    with pytest.raises(KeyboardInterrupt):
        script.main(argv)


def test_a_paced_cell_is_kept_with_the_name_of_its_data(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    kinds = {"goodput": 0.5, "tokens_per_s": 100.0, "ttft_mean_s": 1.0}
    told = dict.fromkeys(paced._UNITS, 1.0) | kinds
    kept_time = {"profile": "p", "source": "s", "dilation": 2.0, "late_fraction": 0.0}
    run = {
        "paced": told,
        "simulated": told,
        "modelled_time": {**kept_time, "num_steps": 1, "num_overrun": 0},
        "num_failed": 0,
        "num_equal": 0,
        "num_compared": 0,
    }
    ran = []

    def run_cell(given: Any, one: PacedCell) -> dict[str, Any]:
        ran.append(one.name)
        return {"duration_s": given.duration, "colocated": run, "elastic": run}

    monkeypatch.setattr(paced, "_run_cell", run_cell)
    file = tmp_path / "paced.json"
    argv = ["--data", str(tmp_path), "--json", str(file)]
    assert paced.main(["longbench-8", *argv]) == 0
    assert paced.main(["longbench-8", "longbench-16", *argv]) == 0
    assert ran == ["longbench-8", "longbench-16"]
    kept = result.read(file)
    assert kept.options["data"] == tmp_path.name
    assert kept.figures["goodput_ratio_min"].samples == [1.0]
    capsys.readouterr()


def test_saturation_grows_with_the_instances() -> None:
    four, eight = (saturation_per_s(CELL, size, None) for size in (4, 8))
    assert 1.7 < eight / four < 2.2
