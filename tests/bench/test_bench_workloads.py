"""Prompts from data files and made-up ones: lengths kept, seeded, bad files named."""

from __future__ import annotations

import json
import os
import re
import sys
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve_bench.datasets.entries import read_entries
from banaserve_bench.datasets.files import DATA_VARIABLE, dataset_files
from banaserve_bench.datasets.prompts import Prompt, prompts, without_middle

BESIDE_CHECKOUT = Path(__file__).resolve().parents[3] / "shared" / "data"


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


def test_alpaca_lengths_order_and_sources(tmp_path: Path) -> None:
    records = [{"instruction": "word " * n} for n in range(1, 40)]
    jsonl(tmp_path / "instruct" / "alpaca.jsonl", *records)
    chosen = prompts("alpaca", 10, 5, 20, 3, tokenize, tmp_path)
    assert all(5 <= prompt.num_tokens <= 20 for prompt in chosen)
    assert len({prompt.text for prompt in chosen}) == 10
    assert chosen == prompts("alpaca", 10, 5, 20, 3, tokenize, tmp_path)
    assert chosen != prompts("alpaca", 10, 5, 20, 4, tokenize, tmp_path)
    first = chosen[0]
    assert first.source == f"alpaca.jsonl:{first.num_tokens}"
    with pytest.raises(UserError, match="only 16 alpaca prompts"):
        prompts("alpaca", 17, 5, 20, 3, tokenize, tmp_path)


def test_longbench_keeps_both_ends(tmp_path: Path) -> None:
    long = "Read this: " + "middle " * 500 + "Question: why? Answer:"
    jsonl(tmp_path / "longbench" / "qmsum.jsonl", {"prompt": long})
    [prompt] = prompts("longbench", 1, 50, 100, 0, tokenize, tmp_path)
    assert prompt.is_cut
    assert 50 <= prompt.num_tokens <= 100
    assert prompt.text.startswith("Read this: middle")
    assert prompt.text.endswith("middle Question: why? Answer:")


@pytest.mark.parametrize("max_tokens", [10, 57, 300])
def test_cutting_leaves_out_no_more_than_needed(max_tokens: int) -> None:
    text = " ".join(f"word{n}" for n in range(1000))
    cut = without_middle(text, max_tokens, tokenize)
    assert max_tokens - 2 <= len(tokenize(cut)) <= max_tokens
    assert without_middle(text, 1000, tokenize) == text


@pytest.mark.parametrize(
    ("min_tokens", "max_tokens"), [(6, 12), (50, 50), (100, 140), (1000, 1500)]
)
def test_synthetic(min_tokens: int, max_tokens: int) -> None:
    made = prompts("synthetic", 12, min_tokens, max_tokens, 1, tokenize)
    assert all(min_tokens <= len(tokenize(prompt.text)) <= max_tokens for prompt in made)
    assert made == prompts("synthetic", 12, min_tokens, max_tokens, 1, tokenize)
    assert len({prompt.text for prompt in made}) == 12
    other = prompts("synthetic", 12, min_tokens, max_tokens, 2, tokenize)
    assert {p.text for p in made} != {p.text for p in other}


def test_synthetic_prompts_share_no_long_beginning() -> None:
    made = prompts("synthetic", 50, 200, 300, 1, tokenize)
    assert len({" ".join(prompt.text.split()[:16]) for prompt in made}) == 50


@pytest.mark.parametrize(
    ("kind", "lengths", "words"),
    [
        ("alpacca", (1, 9), "did you mean alpaca"),
        ("synthetic", (0, 9), "no such lengths"),
        ("synthetic", (9, 8), "no such lengths"),
        ("synthetic", (1, 1), "only 0 synthetic"),
        ("alpaca", (1, 9), "give their file or folder"),
    ],
)
def test_what_cannot_be(
    kind: str, lengths: tuple[int, int], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    with pytest.raises(UserError, match=words):
        prompts(kind, 3, *lengths, 0, tokenize)


def test_the_environment_names_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    with pytest.raises(UserError, match="no longbench file"):
        prompts("longbench", 1, 1, 9, 0, tokenize)
    jsonl(tmp_path / "longbench" / "a.jsonl", {"prompt": "Here it is."})
    expected = [Prompt("Here it is.", 4, "a.jsonl:1")]
    assert prompts("longbench", 1, 1, 9, 0, tokenize) == expected
    file = jsonl(tmp_path / "mine.jsonl", {"text": "Mine."})
    assert prompts("alpaca", 1, 1, 9, 0, tokenize, file) == [Prompt("Mine.", 2, "mine.jsonl:1")]


@pytest.mark.skipif(
    not BESIDE_CHECKOUT.is_dir() and DATA_VARIABLE not in os.environ, reason="no data files here"
)
@pytest.mark.parametrize(("kind", "lengths"), [("alpaca", (4, 50)), ("longbench", (1000, 4000))])
def test_published_data(kind: str, lengths: tuple[int, int]) -> None:
    pytest.importorskip("zstandard")
    data = None if DATA_VARIABLE in os.environ else BESIDE_CHECKOUT
    chosen = prompts(kind, 32, *lengths, 0, tokenize, data)
    assert len({prompt.text for prompt in chosen}) == 32


def test_a_dataset_is_found_in_a_data_folder_in_its_own_folder_and_as_a_file(tmp_path):
    made = jsonl(tmp_path / "longbench" / "qa.jsonl", {"prompt": "Read this."})
    for given in (tmp_path, tmp_path / "longbench", made):
        assert dataset_files("longbench", given) == [made]
    with pytest.raises(UserError, match="no longbench file"):
        dataset_files("longbench", tmp_path / "nothing")
