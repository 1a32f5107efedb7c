"""The result format: what is written can be read, what is wrong is refused."""

from __future__ import annotations

from datetime import UTC, datetime
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from banaserve.base.errors import UserError
from banaserve_bench.results import result as results_result
from banaserve_bench.results.result import (
    Figure,
    Result,
    figure,
    read,
    result,
    schema,
    table,
    write,
)

BENCHMARKS = Path(__file__).resolve().parents[2] / "benchmarks"
STARTED_AT = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)


def example(**figures: Figure) -> Result:
    return result(
        "handover",
        seed=7,
        options={"pd": "1:1", "runs": 3},
        started_at=STARTED_AT,
        figures=figures or {"cpu_ratio": figure([1.1, 1.05, 1.2], "1")},
        notes=["two cores"],
        raw={"requests": [{"id": "r0", "ttft_s": 0.25}]},
    )


def test_figure() -> None:
    assert figure([3, 1, 2], "ms") == Figure("ms", 2.0, 1.0, 3.0, [3.0, 1.0, 2.0])


@pytest.mark.parametrize("samples", [[], [1.0, float("nan")], [float("inf")]])
def test_figure_of_no_numbers(samples: list[float]) -> None:
    with pytest.raises(ValueError, match="sample"):
        figure(samples, "s")


def test_what_is_written_is_read_back(tmp_path: Path) -> None:
    path = tmp_path / "new" / "run.json"
    write(example(), path)
    assert read(path) == example()
    write(example(), path)
    assert [file.name for file in path.parent.iterdir()] == ["run.json"]


def test_numbers_are_rounded_and_a_figure_is_one_line(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    pause = figure([0.123456789, 123456.123456789, 1 / 3, 1 / 7], "s")
    record = example(pause=pause, **{f"n{number}": figure([number], "1") for number in range(9)})
    write(msgspec.structs.replace(record, raw={"at_s": [[1 / 3] * 100, [123456789.0]]}), path)
    found = read(path)
    assert found.figures["pause"].samples == [0.12346, 123460.0, 0.33333, 0.14286]
    assert found.raw == {"at_s": [[0.33333] * 100, [123456789.0]]}
    [line] = [one for one in path.read_text().splitlines() if '"pause": ' in one]
    assert line.count("samples") == 1


def test_a_record_that_cannot_be_read_is_not_written(tmp_path: Path) -> None:
    record = msgspec.structs.replace(example(), started_at=datetime(2030, 1, 2))
    with pytest.raises(msgspec.ValidationError, match="timezone"):
        write(record, tmp_path / "run.json")
    assert list(tmp_path.iterdir()) == []


def test_unwritable_place(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot write"):
        write(example(), tmp_path / "file" / "run.json")


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ('"seed": 7', '"seed": "7"', "seed"),
        ('"seed": 7', '"sead": 7', "seed|sead"),
        ('"notes"', '"extra": 1, "notes"', "extra"),
        ('"median":1.1', '"median":1.0', "not those of the samples"),
        ('"schema_version": 1', '"schema_version": 2', "schema_version"),
        ('"schema_version": 1,', "", "schema_version"),
        ('05Z"', '05"', "timezone"),
    ],
)
def test_a_file_that_differs_is_refused(tmp_path: Path, old: str, new: str, words: str) -> None:
    path = tmp_path / "run.json"
    write(example(), path)
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(UserError, match=words):
        read(path)


@pytest.mark.parametrize("data", [b'{"name": "\xff"}', b'{"raw": {"a": ' + b"[" * 9999])
def test_a_file_that_is_no_json_is_refused(tmp_path: Path, data: bytes) -> None:
    (tmp_path / "run.json").write_bytes(data)
    with pytest.raises(UserError, match="is not a benchmark result"):
        read(tmp_path / "run.json")


def test_a_missing_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="cannot read"):
        read(tmp_path / "none.json")


def test_the_schema_is_the_checked_in_one() -> None:
    wanted = (BENCHMARKS / "schema.json").read_bytes()
    assert schema() == wanted, "python -m banaserve_bench.results.result > benchmarks/schema.json"


def test_the_schema_accepts_a_result() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    data = msgspec.json.decode(msgspec.json.encode(example()))
    described = msgspec.json.decode(schema())
    jsonschema.validate(data, described)
    data["seed"] = "7"
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(data, described)


def test_provenance() -> None:
    record = example()
    assert record.machine.num_cores >= 1
    assert record.machine.memory_bytes > 2**20
    assert record.versions.python.startswith("3.")
    assert (record.commit is None) == (record.dirty is None)


def test_no_commit_outside_a_checkout(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(
        results_result.banaserve, "__file__", str(tmp_path / "banaserve" / "__init__.py")
    )
    assert results_result.commit() == (None, None)


def test_table_names_every_figure() -> None:
    shown = table(example(cpu_ratio=figure([1.0, 1.2], "1"), ttft=figure([0.25], "s")))
    console = Console(width=120)
    with console.capture() as captured:
        console.print(shown)
    text = captured.get()
    assert "handover: seed 7" in text
    for word in ("cpu_ratio", "1.1", "18.2%", "ttft", "0.25", "0.0%"):
        assert word in text
