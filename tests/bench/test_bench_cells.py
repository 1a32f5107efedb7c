"""`bench cells`: a small run shows all and loses nothing; what is wrong is one line."""

from __future__ import annotations

from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve_bench.results import result
from benchmarks.cells import command as cells
from benchmarks.cells import growth

SMALL = ["--instances", "32", "--regions", "2", "--cell-size", "8", "--node-size", "4"]
SHORT = [
    "--rps",
    "2",
    "--duration",
    "2",
    "--node-deaths",
    "3",
    "--back-after",
    "2",
    "--notice",
    "0.5",
]


@pytest.fixture
def small_growth(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "_LOOP_S", 0.0)
    monkeypatch.setattr(growth, "_REPEATS", 1)
    sizes = [(name, (8,), measure) for name, _, measure in cells._GROWTHS]
    monkeypatch.setattr(cells, "_GROWTHS", tuple(sizes))


def test_a_small_run_writes_every_figure_and_loses_nothing(tmp_path: Path, small_growth) -> None:
    path = tmp_path / "cells.json"
    trips = tmp_path / "rtt.csv"
    trips.write_text("src,dst,avg_rtt\naws:us-east-1,aws:us-west-2,62\n")
    argv = [*SMALL, *SHORT, "--runs", "2", "--data", str(trips), "--json", str(path)]
    assert cells.main(argv) == 0
    record = result.read(path)
    assert record.figures["lost_or_doubled_requests"].samples == [0]
    assert record.figures["num_cells"].median == 4
    assert record.figures["num_node_deaths"].median > 0
    # A request, its first token and its end pass the balancer that it came to, at least.
    assert record.figures["messages_a_request"].median >= 3
    assert record.figures["controller_ms_8"].unit == "ms"
    assert len(record.figures["balancer_us_8"].samples) == 2
    assert record.figures["kib_of_instance_8"].median > 0
    [told] = record.raw["simulations"]
    assert told["num_sent"] == told["num_ended"] > 50


def test_measured_round_trips_lie_below_a_folder(tmp_path: Path) -> None:
    folder = tmp_path / "rtt"
    folder.mkdir()
    with pytest.raises(UserError, match=r"cannot read .*rtt/skyplane_rtt_ms\.csv\.zst"):
        cells.main([*SMALL, *SHORT, "--data", str(tmp_path)])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--runs", "0", "--sim-runs", "0"], "one of them at least 1"),
        (["--regions", "6"], "regions is 6: give 1 to 5"),
        (["--instances", "7"], "give a multiple of 10"),
        (["--policy", "nearest", "--instances", "20"], "nearest"),
    ],
)
def test_what_makes_no_sense_is_refused(argv: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        cells.main(argv)
