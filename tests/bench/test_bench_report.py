"""The report: every result read, each figure with its interval, plots beside the page."""

from __future__ import annotations

import json
import random
import re
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest

from banaserve.base.errors import UserError
from banaserve_bench.loadgen.client import RequestRecord
from banaserve_bench.report import tables
from banaserve_bench.report.plots import cdf
from banaserve_bench.report.report import main, write_report
from banaserve_bench.results import result
from banaserve_bench.serving.cell import CellId, Sent
from banaserve_bench.serving.run import as_result
from banaserve_bench.serving.summary import Slo, Summary, summarize

COMMITTED = Path(__file__).resolve().parents[2] / "benchmarks" / "results"


def cell(load: float, seed: int, slowness: float) -> Summary:
    draws = random.Random(f"{load} {seed}")
    sent = []
    for number in range(20):
        at_s = number / load
        first_s = at_s + slowness * draws.uniform(0.1, 0.2)
        tokens = [first_s + 0.02 * n for n in range(5)]
        record = RequestRecord(
            id=f"r{number}",
            due_at_s=at_s,
            sent_at_s=at_s,
            first_token_at_s=first_s,
            token_at_s=tokens,
            ended_at_s=tokens[-1],
            prompt_tokens=10,
            completion_tokens=5,
        )
        sent.append(
            Sent(
                is_warm_up=False,
                source="x",
                prompt_tokens=10,
                output_tokens=5,
                is_cut=False,
                record=record,
            )
        )
    return summarize(CellId(load, seed), sent, Slo(), 0.01)


def serving_result(system: str, slowness: float) -> result.Result:
    cells = [cell(load, seed, slowness) for seed in (0, 1, 2) for load in (1.0, 2.0)]
    return as_result(
        cells,
        options={"system": system},
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        num_cells=6,
        notes=["a < b & c"],
    )


def written(folder: Path) -> Path:
    result.write(serving_result("fast", 1.0), folder / "fast" / "result.json")
    result.write(serving_result("slow", 2.0), folder / "slow.json")
    (folder / "fast" / "run.json").write_text("{}")
    (folder / "fast" / "summaries").mkdir()
    (folder / "fast" / "summaries" / "x.json").write_text("{}")
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return written(tmp_path / "in")


def test_the_page(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([str(folder), "--out", str(out), "--title", "A & B"]) == 0
    assert capsys.readouterr().out.split() == [str(out / "report.md")]
    page = (out / "report.md").read_text()
    assert page.startswith("# A & B\n")
    assert "a < b & c" in page
    assert "±" in page
    # What is small print stands behind what it explains.
    assert page.index("goodput, requests/s") < page.index("What this rests on")
    plots = [line for line in page.splitlines() if line.startswith("![")]
    # Figures over the load and distributions, for two results.
    assert len(plots) == 2 * 2
    for line in plots:
        ElementTree.parse(out / line.partition("(")[2].rstrip(")"))


@pytest.mark.room
def test_committed_results_make_a_report(tmp_path: Path) -> None:
    markdown = write_report(COMMITTED, tmp_path, "all").read_text()
    for path in COMMITTED.rglob("*.json"):
        name = json.loads(path.read_bytes()).get("name")
        assert name is None or f"## {name}" in markdown
    cells = "".join(line for line in markdown.splitlines() if line.startswith("|"))
    assert not re.search(r"\de[+-]\d", cells)


def test_without_matplotlib_the_rest_is_there(
    folder: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    page = write_report(folder, tmp_path, "t").read_text()
    [line] = capsys.readouterr().err.splitlines()
    assert line.endswith("pip install matplotlib")
    assert line in page
    assert "goodput, requests/s" in page
    assert "![" not in page


def test_matplotlib_is_imported_to_draw_alone() -> None:
    code = (
        "import sys; from banaserve_bench.compare import command; "
        "from banaserve_bench.report import report; sys.exit('matplotlib' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_what_cannot_be_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        main([str(tmp_path / "none")])
    with pytest.raises(UserError, match="holds no results"):
        main([str(tmp_path)])
    (tmp_path / "bad.json").write_text('{"name": 1}')
    with pytest.raises(UserError, match=r"bad.json is not a benchmark result"):
        main([str(tmp_path)])


def test_a_table() -> None:
    table = [["load", "<a|b>"], ["x", tables.Best("2")], ["long", "[10 ± 3]"]]
    assert tables.as_markdown(table).splitlines() == [
        "| load |   <a\\|b> |",
        "| ---- | -------: |",
        "| x    |    **2** |",
        "| long | [10 ± 3] |",
    ]


def test_columns_of_numbers_are_those_without_a_word() -> None:
    rows = [
        ["0.5 requests/s", "8 at once", "1,450 ≈", "-", "-3", "12 GB of it", "layers 0:4"],
        ["1 requests/s", "16 at once", "[2.5]", "710 ± 180", "-", "x", "-"],
    ]
    assert tables.number_columns(rows) == [False, False, True, True, True, False, False]


def test_a_table_without_rows_is_not_shown(tmp_path: Path) -> None:
    record = msgspec.structs.replace(serving_result("none", 1.0), figures={}, raw={})
    result.write(record, tmp_path / "nothing.json")
    assert "|" not in write_report(tmp_path, tmp_path, "Empty").read_text()


def test_cdf() -> None:
    assert cdf([]) == []
    assert cdf([3, 1, 2]) == [(1, 1 / 3), (2, 2 / 3), (3, 1), (3, 1)]
    many = cdf(range(10_000))
    assert len(many) <= 102
    assert many[-1] == (9999, 1.0)
