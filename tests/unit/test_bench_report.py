"""The report: every result read, tables with intervals, plots that are sound SVG."""

from __future__ import annotations

import json
import random
import xml.etree.ElementTree as ElementTree
from datetime import UTC, datetime
from pathlib import Path

import pytest

from banaserve.bench.loadgen.client import RequestRecord
from banaserve.bench.report.plot import Plot, Series, svg
from banaserve.bench.report.report import cdf, main, write_report
from banaserve.bench.results import result
from banaserve.bench.serving.cell import CellId, Sent
from banaserve.bench.serving.run import as_result
from banaserve.bench.serving.summary import Slo, Summary, summarize
from banaserve.errors import UserError

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
        name="serving",
        options={"system": system},
        started_at=datetime(2026, 1, 1, tzinfo=UTC),
        num_cells=6,
        notes=["a < b & c"],
    )


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    result.write(serving_result("fast", 1.0), tmp_path / "in" / "fast" / "result.json")
    result.write(serving_result("slow", 2.0), tmp_path / "in" / "slow.json")
    (tmp_path / "in" / "fast" / "run.json").write_text("{}")
    (tmp_path / "in" / "fast" / "summaries").mkdir()
    (tmp_path / "in" / "fast" / "summaries" / "x.json").write_text("{}")
    return tmp_path / "in"


def test_pages(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    assert main([str(folder), "--out", str(out), "--title", "A & B"]) == 0
    assert capsys.readouterr().out.split() == [str(out / "report.html"), str(out / "report.md")]
    html, markdown = (out / "report.html").read_text(), (out / "report.md").read_text()
    for page in (html, markdown):
        assert page.count("| fast |" if page is markdown else "<td>fast</td>") == 2
        assert "±" in page
    assert "A &amp; B" in html
    assert "a &lt; b &amp; c" in html
    plots = [line for line in markdown.splitlines() if line.startswith("![")]
    # Five metrics over the load, and three distributions at each of two loads; for two results.
    assert len(plots) == 2 * (5 + 2 * 3)
    assert html.count("<svg") == len(plots)
    for line in plots:
        ElementTree.parse(out / line.partition("(")[2].rstrip(")"))


def test_committed_results_make_a_report(tmp_path: Path) -> None:
    page = write_report(COMMITTED, tmp_path, "all")[1].read_text()
    for path in COMMITTED.rglob("*.json"):
        name = json.loads(path.read_bytes()).get("name")
        assert name is None or f"## {name}" in page


def test_what_cannot_be_reported(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="there is no folder"):
        main([str(tmp_path / "none")])
    with pytest.raises(UserError, match="holds no results"):
        main([str(tmp_path)])
    (tmp_path / "bad.json").write_text('{"name": 1}')
    with pytest.raises(UserError, match=r"bad.json is not a benchmark result"):
        main([str(tmp_path)])


def test_lines_go_through_their_points() -> None:
    series = [Series("a", [(1, 0), (2, 10)], [(0, 1), (9, 11)]), Series("b", [(1, 5), (2, 5)])]
    root = ElementTree.fromstring(svg(Plot("T <1>", "x", "y", series)))
    space = "{http://www.w3.org/2000/svg}"
    heights = [float(dot.get("cy") or "") for dot in root.iter(f"{space}circle")]
    zero, ten, *middle = heights
    assert zero > ten
    assert middle == pytest.approx([(zero + ten) / 2] * 2, abs=0.1)
    classes = {line.get("class") for line in root.iter(f"{space}path")}
    assert {"line s0", "line s1", "whisker s0"} <= classes
    style = root.findtext(f"{space}style") or ""
    assert "prefers-color-scheme:dark" in style
    assert "stroke-dasharray" in style


@pytest.mark.parametrize("points", [[(1.0, 0.0)], [(0.001, 3.0), (1000.0, 3.0)], [(5.0, -2.0)]])
@pytest.mark.parametrize("is_log", [False, True])
def test_any_points_can_be_drawn(points: list[tuple[float, float]], is_log: bool) -> None:
    drawn = svg(Plot("t", "x", "y", [Series("a", points), Series("none", [])], x_log=is_log))
    ElementTree.fromstring(drawn)
    assert "nan" not in drawn
    assert "none</text>" not in drawn


def test_cdf() -> None:
    assert cdf([]) == []
    assert cdf([3, 1, 2]) == [(1, 1 / 3), (2, 2 / 3), (3, 1), (3, 1)]
    many = cdf(range(10_000))
    assert len(many) <= 202
    assert many[-1] == (9999, 1.0)
