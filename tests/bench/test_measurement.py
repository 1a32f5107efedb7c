"""What a benchmark's result says of its run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from banaserve_bench.results import result
from benchmarks.measurement import Measurement, parser_of


@pytest.fixture(autouse=True)
def signals_as_before() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


def test_a_result_has_the_options_and_no_folder_of_the_machine(tmp_path: Path) -> None:
    parser = parser_of("pacing", "words")
    parser.add_argument("--seed", type=int)
    parser.add_argument("--folder", type=Path)
    path = tmp_path / "x.json"
    given = parser.parse_args(["--json", str(path), "--seed", "3", "--folder", str(tmp_path)])
    measurement = Measurement("pacing", given)
    record = measurement.result({"a": ([1.0, 3.0], "s")}, ["a note"], raw={"more": 1})
    measurement.keep(record)
    kept = result.read(path)
    assert (kept.name, kept.seed, kept.options) == ("pacing", 3, {"folder": tmp_path.name})
    assert (kept.figures["a"].median, kept.notes, kept.raw) == (2.0, ["a note"], {"more": 1})


def test_without_a_file_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    measurement = Measurement("pacing", parser_of("pacing", None).parse_args([]))
    record = measurement.result({"a": ([1.0], "s")}, ())
    measurement.keep(record)
    measurement.deliver(record)
    assert list(tmp_path.iterdir()) == []
    assert "pacing: seed 0" in capsys.readouterr().out
