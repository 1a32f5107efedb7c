"""A description names the source, range and error of step times; `simulate` takes them."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path

import pytest

from banaserve.base.errors import UserError
from banaserve.cli.main import main
from banaserve.silicon.description import read
from operator_tables import write_operators

_HEAD = 'name = "made-up"\nsource = "a test"\nvalid_for = "any step"\nerror = "not known"\n'
_FILES = '[files]\nprefix = "gpu_model_tp1"\nnum_layers = 4\n'
_PACKAGE = '[aiconfigurator]\nmodel = "Qwen/Qwen3-32B"\nsystem = "h100_sxm"\n'


@pytest.fixture
def described(tmp_path: Path) -> Path:
    write_operators(tmp_path)
    path = tmp_path / "steps.toml"
    path.write_text(f"{_HEAD}host_s = 1e-3\n{_FILES}")
    return path


def test_a_description_of_files(described: Path) -> None:
    found = read(described)
    assert (found.name, found.source, found.host_s) == ("made-up", "a test", 1e-3)
    assert found.times.step_s(0, 0, 1, 100) > 0


@pytest.mark.parametrize(
    ("text", "error"),
    [
        (_FILES, "name is missing"),
        (_HEAD, "give one of the sections"),
        (_HEAD + _FILES + _PACKAGE, "give one of the sections"),
        (f"{_HEAD}host_s = 5\n{_FILES}", "host_s is 5: give 0 to 0.1"),
        (f"{_HEAD}host_s = true\n{_FILES}", "host_s is True"),
        (_HEAD + _FILES.replace("prefix", "prefex"), "key in steps.toml: files"),
        (_HEAD + _FILES.replace("4", "0"), "files.num_layers is 0"),
        (f"{_HEAD}{_FILES}experts = {{ num_experts = 8 }}\n", "experts_per_token is missing"),
        (f"{_HEAD}{_PACKAGE}expert_parallel = 1\n", "expert_parallel is 1"),
        (f"{_HEAD}files = 3\n", "files is no section"),
    ],
)
def test_a_wrong_description_is_one_error(described: Path, text: str, error: str) -> None:
    described.write_text(text)
    with pytest.raises(UserError, match=error):
        read(described)


@pytest.mark.skipif(find_spec("aiconfigurator_core") is not None, reason="the package is there")
def test_without_the_package_the_error_says_what_to_install(described: Path) -> None:
    described.write_text(_HEAD + _PACKAGE)
    with pytest.raises(UserError, match=r"pip install 'banaserve\[plan\]'"):
        read(described)


@pytest.mark.skipif(find_spec("aiconfigurator_core") is None, reason="the package is not there")
def test_step_times_of_the_package_grow_with_the_work(described: Path) -> None:
    described.write_text(_HEAD + _PACKAGE)
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
    figures = [one["runs"][0]["systems"]["colocated"] for one in (linear, measured)]
    assert figures[0]["tpot_p50_s"] != figures[1]["tpot_p50_s"]
    assert figures[1]["finished_fraction"] == 1.0
    assert main([*command, "--step-times", str(described)]) == 0
    assert "step times made-up (a test)" in capsys.readouterr().out
