"""``python -m docs.models``: the page of model families says what was run, and nothing else."""

from __future__ import annotations

import json
from pathlib import Path

import msgspec
import pytest

import docs.models as docs_models
from docs.models import Shown, page, stale

pytestmark = pytest.mark.room

TEST = "tests/tools/test_docs_models.py::test_only_what_was_run_works"
WORKS = Shown("deepseek_v2", "hand-over", "works", "", TEST, "0.32.0")
REFUSED = Shown("falcon_h1", "hand-over", "refused", "FalconH1ForCausalLM keeps x", TEST, "0.32.0")


def test_only_what_was_run_works() -> None:
    text = page([WORKS, REFUSED])
    rows = [line for line in text.splitlines() if line.startswith(("| DeepSeek", "| Falcon"))]
    assert [row.count("works") for row in rows] == [1, 0]
    assert [row.count("refused (1)") for row in rows] == [0, 1]
    assert [row.count("not run") for row in rows] == [len(docs_models.FEATURES) - 1] * 2
    assert "1. the model keeps x" in text


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"test": "tests/tools/test_docs_models.py::test_gone"}, "there is no"),
        ({"test": "tests/families/gone.py::test_gone"}, "there is no"),
        ({"feature": "flight"}, "name it in docs/models.py"),
        ({"family": "nobody"}, "name it in docs/models.py"),
    ],
)
def test_a_row_without_a_test_or_a_name_is_a_finding(
    changes: dict[str, str], words: str, tmp_path: Path
) -> None:
    rows = [msgspec.structs.replace(WORKS, **changes)]
    (tmp_path / "models.md").write_text(page(rows))
    [line] = stale(rows, tmp_path / "models.md")
    assert words in line


def test_a_stale_page_is_one_line_with_the_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(docs_models, "RECORD", tmp_path / "models.json")
    monkeypatch.setattr(docs_models, "PAGE", tmp_path / "models.md")
    (tmp_path / "models.json").write_text(json.dumps([msgspec.to_builtins(WORKS)]))
    assert docs_models.main(["--check"]) == 1
    [line] = capsys.readouterr().out.splitlines()
    assert docs_models.COMMAND in line
    (tmp_path / "models.md").write_text(page([WORKS]))
    assert docs_models.main(["--check"]) == 0
