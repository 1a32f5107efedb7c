"""Prompts from data files and made-up ones: lengths kept, seeded, bad files named."""

from __future__ import annotations

import gzip
import json
import re
import sys
from codecs import BOM_UTF8
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve_bench.datasets.entries import read_entries
from banaserve_bench.datasets.files import DATA_VARIABLE, data_folder, dataset_files
from banaserve_bench.datasets.items import without_middle


def tokenize(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def jsonl(path: Path, *records: object) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def texts(path: Path) -> list[str | None]:
    return [entry.text for entry in read_entries(path)]


@pytest.mark.parametrize(
    ("record", "expected"),
    [
        ({"instruction": "Add.", "input": "", "output": "3"}, "Add."),
        ({"instruction": "Add.", "input": "1 and 2"}, "Add.\n\n1 and 2"),
        ({"prompt": "Read this.", "answers": ["x"]}, "Read this."),
        ({"question": "Why?"}, "Why?"),
        ({"context": "Long {text}", "input": "Who?", "dataset": "qasper"}, "Long {text} / Who?"),
    ],
)
def test_fields(tmp_path: Path, record: dict[str, object], expected: str) -> None:
    jsonl(tmp_path / "config" / "dataset2prompt.json", {"qasper": "{context} / {input}"})
    assert texts(jsonl(tmp_path / "one.jsonl", record)) == [expected]


def test_longbench_template_is_found_by_the_name_of_the_file(tmp_path: Path) -> None:
    jsonl(tmp_path / "dataset2prompt.json", {"hotpotqa": "{context}? {input}"})
    assert texts(jsonl(tmp_path / "hotpotqa.jsonl", {"context": "a", "input": "b"})) == ["a? b"]


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ('{"output": 1}', "line 2: none of the fields"),
        ("[1]", "line 2: not a JSON object"),
        ('{"prompt"', "line 2: not a JSON object"),
        ('{"context": "c", "input": "i"}', "line 2: no template for 'bad'"),
    ],
)
def test_a_bad_line_is_named(tmp_path: Path, line: str, words: str) -> None:
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "fine"}\n' + line + "\n")
    with pytest.raises(UserError, match=words):
        texts(path)


def test_compressed_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "one.jsonl.zst"
    path.write_bytes(b"not zstd at all")
    with monkeypatch.context() as without:
        without.setitem(sys.modules, "zstandard", None)
        with pytest.raises(UserError, match="install the package zstandard"):
            texts(path)
    zstandard = pytest.importorskip("zstandard")
    with pytest.raises(UserError, match="not a zstd file"):
        texts(path)
    path.write_bytes(zstandard.compress(b'{"prompt": "packed"}\n{"prompt": "twice"}\n'))
    assert texts(path) == ["packed", "twice"]


def test_what_other_tools_write_before_the_text(tmp_path: Path) -> None:
    path = tmp_path / "one.jsonl"
    path.write_bytes(BOM_UTF8 + b'{"prompt": "marked"}\n')
    assert texts(path) == ["marked"]
    path.write_bytes(gzip.compress(b'{"prompt": "packed"}\n'))
    with pytest.raises(UserError, match="is compressed with gzip: unpack it"):
        texts(path)


@pytest.mark.parametrize("max_tokens", [10, 57, 300])
def test_cutting_leaves_out_no_more_than_needed(max_tokens: int) -> None:
    text = " ".join(f"word{n}" for n in range(1000))
    cut = without_middle(text, max_tokens, tokenize)
    assert max_tokens - 2 <= len(tokenize(cut)) <= max_tokens
    assert without_middle(text, 1000, tokenize) == text


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert data_folder(None) == tmp_path
    assert data_folder(tmp_path / "other") == tmp_path / "other"


def test_a_dataset_is_found_in_a_data_folder_in_its_own_folder_and_as_a_file(tmp_path):
    made = jsonl(tmp_path / "longbench" / "qa.jsonl", {"prompt": "Read this."})
    for given in (tmp_path, tmp_path / "longbench", made):
        assert dataset_files("longbench", given) == [made]
    with pytest.raises(UserError, match="no longbench file"):
        dataset_files("longbench", tmp_path / "nothing")
    with pytest.raises(UserError, match="give their file or folder"):
        dataset_files("longbench", None)
