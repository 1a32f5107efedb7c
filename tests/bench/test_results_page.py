"""``python -m benchmarks results``: a page is stale where its files have changed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from banaserve.errors import UserError
from benchmarks import results_page


def test_a_stale_page_is_one_line_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(results_page, "PAGE", tmp_path / "RESULTS.md")
    assert results_page.main(["--check"]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert results_page.COMMAND in line
    assert not (tmp_path / "RESULTS.md").exists()


def test_a_changed_file_makes_the_page_stale(tmp_path: Path) -> None:
    source = json.loads((results_page.RESULTS / "stall.json").read_text())
    (tmp_path / "stall.json").write_text(json.dumps(source))
    before = results_page.page(tmp_path)
    source["figures"]["gap_ratio"]["unit"] = "furlongs"
    (tmp_path / "stall.json").write_text(json.dumps(source))
    after = results_page.page(tmp_path)
    assert before != after
    assert "furlongs" in after
    assert "make bench NAME=stall" in after


def test_a_result_of_an_unknown_benchmark_is_named(tmp_path: Path) -> None:
    source = json.loads((results_page.RESULTS / "stall.json").read_text()) | {"name": "stalled"}
    (tmp_path / "stalled.json").write_text(json.dumps(source))
    with pytest.raises(UserError, match="stalled"):
        results_page.page(tmp_path)


@pytest.mark.parametrize(("code", "typed"), [("drawn", "--code"), ("mine.csv", "--code mine.csv")])
def test_the_command_of_code_completion_is_what_was_typed(
    code: str, typed: str, tmp_path: Path
) -> None:
    source = json.loads((results_page.RESULTS / "elastic.json").read_text())
    (tmp_path / "elastic-code.json").write_text(json.dumps(source | {"options": {"code": code}}))
    assert f"`make bench NAME=elastic ARGS='{typed}'`" in results_page.page(tmp_path)
