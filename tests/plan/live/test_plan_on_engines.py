"""`banaserve plan probe` on a real vLLM engine, and `plan --confirm` on paced engines."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import small_model
from banaserve.cli.main import main
from banaserve.orchestrator.control.costs.profile import load
from banaserve_bench.loadgen.servers import vllm_server

pytestmark = [pytest.mark.e2e, pytest.mark.room]

_OPTIONS = ("--dtype", "float32", "--enforce-eager", "--kv-cache-memory-bytes", str(512 << 20))
_MOST_ERROR = 0.5
"""Largest mean error of prompts alone and of batches that is no defect, on a busy machine."""
_BUSY = ("under other load", "slower than its first answers")
"""Words of errors that say that other processes have disturbed a probe."""
_TRIES = 3


def test_a_real_engine_is_probed_and_its_profile_simulates(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path = small_model.resolve(), tmp_path / "measured.toml"
    with vllm_server(model.path_or_id, model.served_name, *_OPTIONS) as server:
        told = _probed(capsys, "--url", server.url, "--duration", "40", "--save", str(path))
        assert main(["plan", "probe", "--url", server.url, "--served-model", "x"]) == 2
    errors = {(one["kind"], one["figure"]): one["mean"] for one in told["errors"]}
    assert errors["prefill", "ttft"] < _MOST_ERROR
    assert errors["decode", "tpot"] < _MOST_ERROR
    # The server says where its model is, how long contexts are and what the cache holds.
    assert [one.partition(" ")[0] for one in told["assumed"]] == ["link", "steps"]
    profile = load(str(path))
    assert profile.model.num_layers == 30
    assert profile.memory.kv_tokens > 1000
    assert profile.error is not None
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text('{"input_length": 100, "output_length": 20}\n')
    load_words = ("--rps", "2", "--duration", "30", "--profile", str(path))
    assert main(["simulate", str(lengths), *load_words, "--colocated", "1", "--json"]) == 0
    assert main(["plan", str(lengths), *load_words, "--slo-tpot", "5", "--instances", "1"]) == 0
    assert "error of step times: unknown" not in capsys.readouterr().out


def _probed(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    """Return what a probe tells; beside other tests, a try may find the machine too busy."""
    for _ in range(_TRIES):
        code, shown = main(["plan", "probe", *argv, "--json"]), capsys.readouterr()
        if code == 0:
            found: dict[str, Any] = json.loads(shown.out)
            return found
        assert any(words in shown.err for words in _BUSY), shown.err
        assert shown.err.count("\n") == 1
    return pytest.skip(f"this machine is too busy for a probe: {shown.err}")


def test_advice_is_confirmed_on_paced_engines(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    lengths = tmp_path / "lengths.jsonl"
    lengths.write_text('{"input_length": 1000, "output_length": 20}\n')
    words = ["--rps", "4", "--duration", "20", "--profile", "llama-3.1-8b-h100"]
    words += ["--instances", "2", "--seeds", "2", "--json"]
    confirm = ("--confirm", "--confirm-duration", "3", "--dilate", "8")
    assert main(["plan", str(lengths), *words, *confirm]) == 0
    told = json.loads(capsys.readouterr().out)
    kinds = {one["system"].partition(" (")[0] for one in told["confirmed"]}
    assert kinds == {"2 colocated", "split 1:1"}
    for one in told["confirmed"]:
        assert one["outcome"]["num_finished"] == one["outcome"]["num_requests"] >= 5
        if not one["is_void"]:
            assert abs(one["errors"]["ttft"]) < 1
            assert abs(one["errors"]["tpot"]) < 1
    assert main(["plan", str(lengths), *words]) == 0
    past = json.loads(capsys.readouterr().out)["past_errors"]
    kept = [one["system"] for one in told["confirmed"] if not one["is_void"]]
    assert [one["system"] for one in past] == kept
