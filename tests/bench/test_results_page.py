"""``python -m benchmarks results``: pages of the result files, and of nothing else."""

from __future__ import annotations

import json
import re
import shutil
import sys
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve_bench.results import result
from benchmarks import results_page

LINK = re.compile(r"\]\(([^)#\s]+)\)")


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("built")
    with redirect_stdout(StringIO()) as printed:
        assert results_page.main(["--out", str(folder)]) == 0
    assert printed.getvalue() == f"{folder / results_page.NAME}\n"
    return folder


@pytest.mark.room
def test_every_result_has_a_section_and_links_lead_to_built_files(built: Path) -> None:
    text = (built / results_page.NAME).read_text()
    for path in results_page.RESULTS.rglob("*.json"):
        assert f"## {path.relative_to(results_page.RESULTS).with_suffix('')}\n" in text
    pages = {path.relative_to(built) for path in built.rglob("*.md")}
    assert pages == results_page.built_pages()
    for page in pages:
        for target in LINK.findall((built / page).read_text()):
            assert (built / page.parent / target).is_file(), (page, target)


@pytest.mark.room
def test_own_pages_say_what_the_result_says(built: Path) -> None:
    paper = (built / "results" / "simulate-paper.md").read_text()
    record = result.read(results_page.RESULTS / "simulate-paper.json")
    most = max(one.median for name, one in record.figures.items() if "_over_static" in name)
    assert f" to {most:.2f} |" in paper
    assert "MODELLED" in (built / results_page.NAME).read_text()


def test_a_file_is_no_folder_for_pages(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match=f"cannot write {tmp_path}/file"):
        results_page.main(["--out", str(tmp_path / "file")])


def test_without_matplotlib_nothing_is_built(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UserError, match="pip install matplotlib"):
        results_page.build(tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("stale", "said"),
    [
        ((), "| the same "),
        ([Path("pacing.json")], "| changed: stale |"),
        (None, "| unknown: the history is not whole |"),
    ],
)
def test_a_stale_result_is_named(stale: list[Path] | None, said: str, tmp_path: Path) -> None:
    shutil.copy(results_page.RESULTS / "pacing.json", tmp_path)
    text = results_page.page(tmp_path, stale)
    assert said in text
    assert ("STALE" in text) is bool(stale)


def test_a_changed_file_changes_the_page(tmp_path: Path) -> None:
    source = json.loads((results_page.RESULTS / "pacing.json").read_text())
    (tmp_path / "pacing.json").write_text(json.dumps(source))
    before = results_page.page(tmp_path)
    source["figures"]["x4.ttft"]["unit"] = "furlongs"
    (tmp_path / "pacing.json").write_text(json.dumps(source))
    after = results_page.page(tmp_path)
    assert before != after
    assert "furlongs" in after
    assert "make bench NAME=pacing" in after


def test_a_result_of_an_unknown_benchmark_is_named(tmp_path: Path) -> None:
    source = json.loads((results_page.RESULTS / "pacing.json").read_text()) | {"name": "paced"}
    (tmp_path / "paced.json").write_text(json.dumps(source))
    with pytest.raises(UserError, match="paced"):
        results_page.page(tmp_path)
