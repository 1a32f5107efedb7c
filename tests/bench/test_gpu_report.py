"""``make gpu-report``: what it refuses, the time of each stage, what is resumed, and the table."""

from __future__ import annotations

import sys
import tarfile
from collections.abc import Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import msgspec
import pytest

from banaserve.base.errors import UserError
from banaserve.base.platform.processes import is_running
from benchmarks import prefix_ttft
from benchmarks.drivers import traced
from benchmarks.gpu import device, report
from benchmarks.gpu.device import DeviceFacts, check
from benchmarks.gpu.report import (
    LEAST_S,
    Stage,
    StageOutcome,
    StageState,
    limit_s,
    stages_of,
    still_to_run,
)
from benchmarks.location import ROOT
from benchmarks.random_model import SIZES
from benchmarks.registry import BENCHMARKS
from waiting import eventually

GOOD = DeviceFacts(
    torch="2.11.0+cu130", torch_cuda="13.0", driver_cuda="13.0", gpu="NVIDIA Test", architecture=90,
    free_bytes=80 << 30, vllm="0.32.0", vllm_library=True,
)  # fmt: skip


# ---- refusals


@pytest.mark.parametrize(
    ("changed", "why"),
    [
        ({"torch": ""}, "torch is not installed.*GPU_PYTHON"),
        ({"torch_cuda": ""}, r"torch 2\.11\.0\+cu130 is built without CUDA.*GPU_PYTHON"),
        ({"driver_cuda": ""}, "no NVIDIA driver is seen here"),
        ({"driver_cuda": "12.8"}, r"driver runs CUDA 12\.8 at most.*needs 13\.0: install a newer"),
        ({"gpu": ""}, "torch sees no GPU.*CUDA_VISIBLE_DEVICES"),
        ({"vllm": ""}, "vLLM is not installed: bring a kit along"),
        ({"vllm_library": False}, r"vLLM 0\.32\.0 is built for CPUs.*GPU_PYTHON"),
        ({"architecture": 80}, "code for architecture 90 and the NVIDIA Test is 80.*--gpu 80"),
        ({"free_bytes": 10 << 30}, r"need 16 GiB and the NVIDIA Test has 10\.0 GiB.*--size tiny"),
    ],
)
def test_a_machine_on_which_it_cannot_run_is_refused(changed: dict[str, Any], why: str) -> None:
    check(GOOD, "1b", (90,))
    with pytest.raises(UserError, match=why):
        check(msgspec.structs.replace(GOOD, **changed), "1b", (90,))


@pytest.mark.deep
def test_this_machine_has_no_gpu_for_it(tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"built without CUDA|no NVIDIA driver|torch sees no GPU"):
        check(device.read_facts(), "tiny", ())


def test_an_unknown_stage_is_refused_before_anything_starts(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="smok"):
        report.main(["--only", "smok", "--out", str(tmp_path / "out")])
    assert not (tmp_path / "out").exists()


# ---- time


@pytest.mark.parametrize("budget_s", [200.0, 430.0, 1800.0])
def test_no_stage_takes_the_time_of_those_behind_it(budget_s: float) -> None:
    stages = stages_of("1b", quick=False)
    left_s = budget_s
    begun = 0
    for place, stage in enumerate(stages):
        allowed_s = limit_s(stage, stages[place + 1 :], left_s)
        assert allowed_s <= min(stage.limit_s, left_s)
        begun += allowed_s >= LEAST_S
        left_s -= allowed_s  # all of them hang
    assert begun >= 4, "served moves have their turn even if all before them hang"
    assert left_s >= 0


def test_a_stage_may_take_what_others_left() -> None:
    stages = stages_of("1b", quick=False)
    served = next(place for place, stage in enumerate(stages) if stage.name == "served")
    alone_s = limit_s(stages[served], stages[served + 1 :], 360)
    assert alone_s > 120
    assert limit_s(stages[-1], [], 1000) == stages[-1].limit_s
    assert limit_s(stages[-1], [], LEAST_S - 1) == 0


def test_tests_of_kernels_come_last_since_they_are_compiled_first() -> None:
    (tests,) = [stage for stage in stages_of("1b", quick=False) if stage.name == "tests"]
    files = [word for word in tests.command if word.startswith("tests/")]
    assert {ROOT / name for name in files} == {*(ROOT / "tests" / "gpu").glob("test_*.py")}
    assert files[-1] == "tests/gpu/test_gpu_kernels.py"


def test_a_further_call_runs_what_is_left_and_then_what_failed() -> None:
    stages = [Stage(name, (), 10, 1) for name in "abcde"]
    ended = {
        "a": StageOutcome("a", StageState.FAILED),
        "b": StageOutcome("b", StageState.OK),
        "c": StageOutcome("c", StageState.STOPPED),
        "d": StageOutcome("d", StageState.NOT_RUN),
    }
    assert [stage.name for stage in still_to_run(stages, ended)] == ["d", "e", "c", "a"]


# ---- runs


@pytest.fixture
def three(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[Stage]:
    """Stages of this test's own on a machine that passes the checks."""

    def stage(name: str, code: str, seconds: float = 30.0) -> Stage:
        return Stage(name, (sys.executable, "-c", code), seconds, 1)

    stages = [
        stage("good", "print('it works')"),
        stage("bad", "import sys; print('no luck'); sys.exit(3)"),
        stage("slow", "import signal; print('begun', flush=True); signal.pause()", 1.0),
    ]
    monkeypatch.setattr(report, "stages_of", lambda size, quick: stages)
    monkeypatch.setattr(device, "read_facts", lambda: GOOD)
    monkeypatch.setattr(report, "ROOT", tmp_path)  # with no kit
    return stages


def told_of(arguments: Sequence[str], capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    code = report.main(arguments)
    return code, capsys.readouterr().out


def test_one_table_and_one_archive_of_everything(
    three: list[Stage], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    code, told = told_of(["--out", str(out), "--budget", "100"], capsys)
    assert code == 1
    table = told.rpartition("\n\n")[2]
    assert "good          ok" in table
    assert "it works" in table
    assert "exit code 3: no luck" in table
    assert "slow          stopped" in table
    assert "at its limit: begun" in table
    with tarfile.open(out / "gpu-report.tar.gz") as archive:
        assert {"table.txt", "stages.json", "logs/bad.log"} <= set(archive.getnames())
    three[1] = Stage("bad", (sys.executable, "-c", "print('mended')"), 30, 1)
    code, told = told_of(["--out", str(out), "--budget", "100"], capsys)
    assert "good (at most" not in told, "it is not run again"
    assert "it works" in told, "but it is in the table"
    assert "mended" in told
    code, told = told_of(["--out", str(out), "--only", "good", "--budget", "5"], capsys)
    assert "good: no time left" in told
    assert "it works" in told, "what has run stays in the table"


@pytest.mark.parametrize("when", ["after a stage", "in a stage"])
def test_a_machine_that_ends_at_any_moment_leaves_an_archive(
    three: list[Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, when: str
) -> None:
    names = """
import sys, tarfile
print("begun", flush=True)
while True:
    try:
        with tarfile.open(sys.argv[1]) as archive:
            if archive.extractfile(sys.argv[2]).read():
                sys.exit(0)
    except (OSError, KeyError):
        pass
"""
    awaited = f"logs/{'good' if when == 'after a stage' else 'looks'}.log"
    archive = str(tmp_path / "out" / "gpu-report.tar.gz")
    three[1:] = [Stage("looks", (sys.executable, "-c", names, archive, awaited), 30, 1)]
    monkeypatch.setattr(report, "_KEEP_S", 30.0 if when == "after a stage" else 0.1)
    assert report.main(["--out", str(tmp_path / "out"), "--budget", "100"]) == 0


def test_a_server_that_ignores_its_end_does_not_outlive_its_stage(
    three: list[Stage], tmp_path: Path
) -> None:
    stays = "import signal; signal.signal(15, signal.SIG_IGN); print(flush=True); signal.pause()"
    starts = f"""
import subprocess, sys
command = [sys.executable, "-c", {stays!r}]
process = subprocess.Popen(command, stdout=subprocess.PIPE, process_group=0)
process.stdout.readline()
print(process.pid)
"""
    three[:] = [Stage("server", (sys.executable, "-c", starts), 30, 1)]
    assert report.main(["--out", str(tmp_path / "out"), "--budget", "100"]) == 0
    pid = int((tmp_path / "out" / "logs" / "server.log").read_text())
    eventually(lambda: not is_running(pid))


def test_the_page_shows_results_and_a_faulty_one_costs_no_archive(
    three: list[Stage], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copied = "import shutil, sys; shutil.copy(sys.argv[1], sys.argv[3]); print('measured')"
    source = next((ROOT / "benchmarks" / "results").rglob("pipeline.json"))
    command = (sys.executable, "-c", copied, str(source))
    three[:] = [Stage("good", command, 30, 1, benchmark=True)]
    assert told_of(["--out", str(tmp_path / "out"), "--budget", "100"], capsys)[0] == 0
    with tarfile.open(tmp_path / "out" / "gpu-report.tar.gz") as archive:
        assert {"report.md", "results/good.json"} <= set(archive.getnames())
    (tmp_path / "out" / "results" / "other.json").write_text("[]")
    command = ["--out", str(tmp_path / "out"), "--only", "good", "--budget", "100"]
    assert "no page of results: " in told_of(command, capsys)[1]
    with tarfile.open(tmp_path / "out" / "gpu-report.tar.gz") as archive:
        assert {"table.txt", "results/other.json"} <= set(archive.getnames())


def test_a_list_of_stages_that_cannot_be_read_is_refused(
    three: list[Stage], tmp_path: Path
) -> None:
    (tmp_path / "stages.json").write_text("{")
    with pytest.raises(UserError, match=r"stages\.json: .*: remove it"):
        report.main(["--out", str(tmp_path)])


def test_blocks_on_ssd_have_the_size_by_which_they_are_counted() -> None:
    words = prefix_ttft._same()
    assert words[words.index("--block-size") + 1] == str(prefix_ttft._BLOCK_TOKENS)


@pytest.mark.parametrize("size", SIZES)
def test_the_traced_engine_has_a_kv_cache_for_each_size(size: str) -> None:
    """vLLM does not start an engine whose cache is too small for the longest prompt."""
    _, shape = SIZES[size]
    head_size = shape.get("head_dim", shape["hidden_size"] // shape["num_attention_heads"])
    values = 2 * shape["num_hidden_layers"] * shape["num_key_value_heads"] * head_size
    options = traced._engine_options("")
    assert options["dtype"] == "float32"
    assert options["kv_cache_memory_bytes"] >= 4 * values * options["max_model_len"]


@pytest.mark.parametrize("size", ["tiny", "1b", "8b"])
@pytest.mark.parametrize("name", [one.name for one in stages_of("1b", quick=False)])
def test_its_options_are_options(
    name: str, size: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The help exits before anything runs, but not before what stands before it is understood."""
    stage = next(one for one in stages_of(size, quick=size == "tiny") if one.name == name)
    words = list(stage.command[1:])
    if words[:2] == ["-m", "benchmarks"]:
        main = import_module(BENCHMARKS[words[2]].module).main
        options = [*words[3:], "--json", str(tmp_path / "x")]
    elif words[1] == "benchmarks.gpu.smoke":
        main, options = import_module(words[1]).main, words[2:]
    else:
        pytest.skip("it takes no options")
    with pytest.raises(SystemExit) as left:
        main([*options, "--help"])
    assert left.value.code == 0
    assert "usage" in capsys.readouterr().out
