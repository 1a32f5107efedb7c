"""``make gpu-report``: one page of what ran, and a line for what did not."""

from __future__ import annotations

import subprocess
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest

from banaserve.bench.results import result
from banaserve.errors import UserError
from benchmarks import gpu_report, run_all
from benchmarks.registry import BENCHMARKS

TINY = ("--runs", "1", "--requests", "300", "--instances", "8", "--cell-size", "4")


@pytest.fixture
def a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    here = msgspec.structs.replace(result.machine(), gpu="NVIDIA Test")
    monkeypatch.setattr(result, "machine", lambda: here)


def test_without_a_gpu_it_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    here = msgspec.structs.replace(result.machine(), gpu=None)
    monkeypatch.setattr(result, "machine", lambda: here)
    with pytest.raises(UserError, match="no GPU is seen here"):
        gpu_report.main(["--out", str(tmp_path)])
    assert list(tmp_path.iterdir()) == []


def test_a_page_of_what_ran_and_a_line_for_what_did_not(
    a_gpu: None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    listed = {"orchestrator": TINY, "report": (str(tmp_path / "none"),)}
    monkeypatch.setattr(gpu_report, "benchmarks_of", lambda size: listed)
    tests = run_all.BenchmarkOutcome("GPU tests", True, "12 passed")
    monkeypatch.setattr(gpu_report, "run_gpu_tests", lambda out: tests)
    assert gpu_report.main(["--out", str(tmp_path)]) == 1
    told = capsys.readouterr().out
    assert "GPU tests: 12 passed" in told
    assert "report: exit code 2:" in told
    page = (tmp_path / "report.md").read_text()
    assert page.startswith("# NVIDIA Test: report")
    assert "## orchestrator" in page


@pytest.mark.parametrize(
    ("code", "last", "is_good", "words"),
    [
        (0, "== 40 passed in 61.2s ==", True, "40 passed"),
        (1, "== 1 failed, 39 passed ==", False, "exit code 1: 1 failed, 39 passed"),
        (5, "3 skipped in 0.1s", False, "none ran: 3 skipped"),
        (None, "", False, "stopped after"),
    ],
)
def test_the_tests_of_a_gpu(
    code: int | None,
    last: str,
    is_good: bool,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    def run(command: list[str], *, stdout: Any, timeout: float, **_: Any) -> Any:
        assert command[-1] == "tests/gpu"
        stdout.write(f"....\n{last}\n".encode())
        if code is None:
            raise subprocess.TimeoutExpired(command, timeout)
        return subprocess.CompletedProcess(command, code)

    monkeypatch.setattr(gpu_report.subprocess, "run", run)
    outcome = gpu_report.run_gpu_tests(tmp_path)
    assert outcome.is_good is is_good
    assert outcome.words.startswith(words)


@pytest.mark.parametrize("size", ["1b", "8b"])
@pytest.mark.parametrize("name", gpu_report.benchmarks_of("1b"))
def test_its_options_are_options(
    name: str, size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help exits before anything runs, but not before what stands before it is understood."""
    main = import_module(BENCHMARKS[name].module).main
    options = gpu_report.benchmarks_of(size)[name]
    with pytest.raises(SystemExit) as left:
        main([*options, "--json", str(tmp_path / "x"), "--help"])
    assert left.value.code == 0
    assert "usage" in capsys.readouterr().out
