"""A description names the source, range and error of step times; `simulate` takes them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve.cli.main import main
from banaserve_bench.silicon.costs import EngineConstants
from banaserve_bench.silicon.description import read
from operator_tables import write_operators

_HEAD = 'name = "made-up"\nsource = "a test"\nvalid_for = "any step"\njudged_on = "no run"\n'
_ERROR = "[error]\nttft = 0.1\ntpot = 0.02\nlatency = 0.06\nttft_p99 = 0.25\ntpot_p99 = 0.03\n"
_ENGINE = "[engine]\nhost_s = 1e-3\n"
_FILES = '[files]\nprefix = "gpu_model_tp1"\nnum_layers = 4\n'
_PACKAGE = '[aiconfigurator]\nmodel = "Qwen/Qwen3-32B"\nsystem = "h100_sxm"\n'


@pytest.fixture
def described(tmp_path: Path) -> Path:
    write_operators(tmp_path)
    path = tmp_path / "steps.toml"
    path.write_text(_HEAD + _ENGINE + _ERROR + _FILES)
    return path


def test_a_description_of_files(described: Path) -> None:
    found = read(described)
    assert (found.name, found.source) == ("made-up", "a test")
    assert found.constants == EngineConstants(host_s=1e-3)
    assert found.error.ttft_p99 == 0.25
    assert found.times.step_s(0, 0, 1, 100) > 0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (_FILES, "name is missing"),
        (_HEAD + _FILES, "error is missing"),
        (_HEAD + _ERROR, "give one of the sections"),
        (_HEAD + _ERROR + _FILES + _PACKAGE, "give one of the sections"),
        (f"{_HEAD}{_ERROR}{_FILES}[engine]\nhost_s = 50\n", "engine.host_s is 50: give at most"),
        (
            f"{_HEAD}{_ERROR}{_FILES}[engine]\nsteps_in_flight = 3\n",
            "steps_in_flight is 3: give at most 2",
        ),
        (f"{_HEAD}{_ERROR}{_FILES}[engine]\nhost_s = 1.1\n", "engine.host_s is 1.1: give at most"),
        (_HEAD + _ERROR.replace("0.06", "6") + _FILES, "error.latency is 6: give at most 1"),
        (_HEAD + _ERROR.replace("tpot = 0.02\n", "") + _FILES, "error.tpot is missing"),
        (_HEAD + _ERROR + _FILES.replace("prefix", "prefex"), "key in steps.toml: files"),
        (_HEAD + _ERROR + _FILES.replace("4", "0"), "files.num_layers is 0"),
        (
            f"{_HEAD}{_ERROR}{_FILES}experts = {{ num_experts = 8 }}\n",
            "experts_per_token is missing",
        ),
        (f"{_HEAD}{_ERROR}{_PACKAGE}expert_parallel = 1\n", "expert_parallel is 1"),
        (f"{_HEAD}files = 3\n{_ERROR}", "files is no section"),
    ],
)
def test_a_wrong_description_is_one_error(described: Path, text: str, error: str) -> None:
    described.write_text(text)
    with pytest.raises(UserError, match=error):
        read(described)


@pytest.mark.skipif(find_spec("aiconfigurator_core") is not None, reason="the package is there")
def test_without_the_package_the_error_says_what_to_install(described: Path) -> None:
    described.write_text(_HEAD + _ERROR + _PACKAGE)
    with pytest.raises(UserError, match=r"pip install 'banaserve-bench\[plan\]'"):
        read(described)


@pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="the package is not there")
def test_step_times_of_the_package_grow_with_the_work(described: Path) -> None:
    described.write_text(_HEAD + _ERROR + _PACKAGE)
    times = read(described).times
    assert times.step_s(0, 0, 8, 8000) < times.step_s(0, 0, 64, 64000)
    assert times.step_s(512, 512**2, 0, 0) < times.step_s(512, 512**2, 64, 64000)
    assert times.step_s(512, 512**2, 0, 0) < times.step_s(512, 512 * (512 + 16000), 0, 0)


def test_a_simulation_takes_them_and_names_them(
    described: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = described.with_name("trace.jsonl")
    lines = [{"t": n / 10, "input_length": 100, "output_length": 9} for n in range(20)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["simulate", str(trace), "--colocated", "1", "--profile", "llama-3.1-8b-h100"]
    assert main([*command, "--json"]) == 0
    linear = json.loads(capsys.readouterr().out)
    assert main([*command, "--step-times", str(described), "--json"]) == 0
    measured = json.loads(capsys.readouterr().out)
    assert "step_times" not in linear
    assert measured["step_times"]["source"] == "a test"
    assert measured["step_times"]["error"]["ttft_p99"] == 0.25
    figures = [one["runs"][0]["systems"]["colocated"] for one in (linear, measured)]
    assert figures[0]["tpot_p50_s"] != figures[1]["tpot_p50_s"]
    assert figures[1]["finished_fraction"] == 1.0
    assert main([*command, "--step-times", str(described)]) == 0
    shown = capsys.readouterr().out
    assert "step times made-up (a test)" in shown
    assert "ttft p99, ms (±25.0%)" in shown
    assert "ttft p50, ms (" not in shown, "medians were not judged"
    described.write_text(described.read_text().replace("ttft_p99 = 0.25\n", ""))
    assert main([*command, "--step-times", str(described), "--json"]) == 0
    assert "ttft_p99" not in json.loads(capsys.readouterr().out)["step_times"]["error"]


def test_a_request_waits_for_one_step_more_if_steps_are_planned_ahead(
    described: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = described.with_name("trace.jsonl")
    lines = [{"t": n / 10, "input_length": 100, "output_length": 90} for n in range(20)]
    trace.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ttft_s = []
    for steps in (1, 2):
        described.write_text(f"{_HEAD}{_ENGINE}steps_in_flight = {steps}\n{_ERROR}{_FILES}")
        command = ["simulate", str(trace), "--colocated", "1", "--profile", "llama-3.1-8b-h100"]
        assert main([*command, "--step-times", str(described), "--json"]) == 0
        result = json.loads(capsys.readouterr().out)["runs"][0]["systems"]["colocated"]
        ttft_s.append(result["ttft_p50_s"])
    assert ttft_s[1] > 1.2 * ttft_s[0]
