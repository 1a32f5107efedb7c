"""`banaserve plan`: classical cases, and what it prints and refuses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from banaserve.cli.main import main

pytestmark = pytest.mark.deep

LONG_PROMPTS = ("--rps", "5", "--duration", "30", "--slo-ttft", "1", "--slo-tpot", "0.012")
ON_TWO = ("--profile", "llama-3.1-8b-h100", "--instances", "2", "--seeds", "3")


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    """Return a file of long prompts with answers of a page."""
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"input_length": 4000, "output_length": 200}\n')
    return str(path)


def _told(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main(["plan", *argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    assert found["time"].startswith("simulated")
    assert found["sentence"].startswith(f"{found['answer']}: ")
    return found


def test_a_small_load_on_one_device_says_no(capsys: pytest.CaptureFixture[str]) -> None:
    load = (
        "alpaca",
        "--rps",
        "2",
        "--duration",
        "20",
        "--profile",
        "smollm2-135m-cpu",
        "--slo-tpot",
        "1",
    )
    told = _told(capsys, *load, "--instances", "1", "--seeds", "2")
    assert told["answer"] == "no"
    assert "one instance cannot be split" in told["sentence"]
    assert "--colocated 1 " in told["command"]


def test_long_prompts_with_a_tight_tpot_say_yes_and_a_wide_error_cannot_tell(
    lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    told = _told(capsys, lengths, *LONG_PROMPTS, *ON_TWO, "--step-error", "0.02", "--price", "2")
    assert told["answer"] == "yes"
    assert told["gain"]["whole"]["low"] > 1
    assert "--pd 1:1 " in told["command"]
    of_split, of_colocated = (
        [prices for name, prices in told["prices_of_1000"].items() if name.startswith(word)]
        for word in ("split", "2 colocated")
    )
    assert all(a < b for one in of_colocated for a, b in zip(of_split[0], one, strict=True))
    [more] = [one for one in told["counter_offers"] if one["kind"] == "instances"]
    assert more["goodput_fraction"] > more["its_goodput_fraction"]
    flips = {one["quantity"]: one for one in told["flip_points"] if one["pays_above"]}
    assert flips["mean prompt tokens"]["high"] < 4000
    wide = _told(capsys, lengths, *LONG_PROMPTS, *ON_TWO, "--step-error", "0.3")
    assert wide["answer"] == "can't tell"
    assert wide["gain"]["whole"]["low"] < 1 < wide["gain"]["of_loads"]["low"]
    assert "--colocated 2 " in wide["command"]
    # The same seeds give the same figures, whatever is assumed of their error.
    assert wide["gain"]["of_loads"] == told["gain"]["of_loads"]


def test_prefixes_bring_the_store_and_text_begins_with_the_answer(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    rows = (
        f'{{"t": {n / 4}, "input_length": 2048, "output_length": 20, "hash_ids": [1, 2, 3, {n}]}}\n'
        for n in range(150)
    )
    path.write_text("".join(rows))
    tried = _told(capsys, str(path), *ON_TWO)["first_load"]
    assert "2 colocated with the store (steps of 2048 tokens)" in tried
    assert main(["plan", str(path), *ON_TWO]) == 0
    shown = capsys.readouterr()
    assert shown.out.startswith("can't tell: ")
    assert "their error is unknown: give --step-times FILE" in shown.out.partition("\n")[0]
    assert "judged on 3 other parts of the trace; error of step times: unknown" in shown.out
    assert "first estimate, of one load" in shown.err
    assert shown.out.splitlines()[-1].startswith("banaserve serve MODEL --colocated 2 ")


def test_an_overload_is_said(lengths: str, capsys: pytest.CaptureFixture[str]) -> None:
    load = ("--rps", "60", "--duration", "3", "--slo-ttft", "0.5", "--slo-tpot", "0.012")
    assert main(["plan", lengths, *load, *ON_TWO, "--seeds", "2", "--step-error", "0.02"]) == 0
    shown = capsys.readouterr().out
    assert "- no system serves more than " in shown
    assert "this is an overload" in shown


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "give a case, a trace or a dataset"),
        (["alpaca", "--rps", "2"], "or --profile, the device and model to plan for"),
        (["alpaca", "--rps", "2", "--profile", "llama-3.1-8b-h10"], "mean llama-3.1-8b-h100?"),
        (["slow-instance"], "slow-instance has events"),
        (["bursts", "--step-error", "5"], "--step-error 5: must be between 0 and 1"),
        (["bursts", "--device", "h100_sxm"], "--device needs --model: a profile has its own"),
        (["bursts", "--model", "m"], "--model needs --device, such as h100_sxm"),
        (["bursts", "--model", "m", "--device", "d", "--instances", "2"], "give --gpus"),
        (["--prompt-tokens", "9x", "--output-tokens", "9"], "give a number, or LOW-HIGH"),
        (["bursts", "--seeds", "1"], "--seeds 1: must be at least 2"),
        (["bursts", "--slo-ttft", "1e-4"], "--slo-ttft 0.0001: an idle engine takes"),
        (["bursts", "--max-step-tokens", "9"], "--max-step-tokens 9: give 2048 or more"),
        (["bursts", "--system", "static"], "unrecognized arguments"),
        (
            ["alpaca", "--rps", "2", "--duration", "5", "--profile", "opt-13b-a100"],
            "give fewer seeds or more requests",
        ),
        (
            ["longbench", "--rps", "2", "--profile", "opt-13b-a100"],
            "longer than the context of opt-13b-a100, 2048 tokens: give another --profile",
        ),
    ],
)
def test_a_mistake_is_one_line_and_exit_code_2(
    argv: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", *argv]) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1
    assert not shown.out


def test_a_trace_without_lengths_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.jsonl"
    path.write_text('{"t": 0, "output_length": 5}\n')
    assert main(["plan", str(path), "--profile", "opt-13b-a100"]) == 2
    assert "line 1: input_length is None: give a whole number above 0" in capsys.readouterr().err
