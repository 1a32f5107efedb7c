"""`banaserve plan --confirm-url`, and the errors that it keeps; no engine runs."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from banaserve.cli.main import main
from banaserve.cli.serve.command_line import parse_serve_argv
from banaserve.orchestrator.control.costs.profile import load
from banaserve.sim.request import SimRequest
from banaserve.sim.result import LatencyLimits
from banaserve_bench.plan.confirm.confirmation import Confirmation, Place
from banaserve_bench.plan.confirm.engines import EngineOutcome, paced_words
from banaserve_bench.plan.confirm.history import (
    PastError,
    append_errors,
    digest_of,
    past_words,
    read_errors,
)
from banaserve_bench.plan.confirm.report import confirmation_rows, void_words
from banaserve_bench.plan.search.candidates import colocated, elastic, fixed_candidates
from banaserve_bench.plan.search.trial import Device
from banaserve_bench.serving.simulated_requests import CaseRequest
from canned_openai import CannedOpenAi, canned_openai

PROFILE = load("llama-3.1-8b-h100")
LOAD = ("--rps", "50", "--duration", "2", "--seeds", "2", "--instances", "2", "--profile")
ERROR = PastError("2026-11-29T01:02:03+00:00", "p", "d", "split 1:1", "paced", 0.1, -0.02, 0.05)
FIGURES = {"goodput_fraction": 0.5, "ttft_mean_s": 0.2, "tpot_mean_s": 0.01}


@pytest.fixture
def server() -> Iterator[CannedOpenAi]:
    with canned_openai() as canned:
        yield canned


@pytest.fixture
def kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return the file of errors in a state folder of this test."""
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    return tmp_path / "state" / "banaserve" / "plan-errors.jsonl"


@pytest.fixture
def lengths(tmp_path: Path) -> str:
    path = tmp_path / "lengths.jsonl"
    path.write_text('{"input_length": 200, "output_length": 3}\n')
    return str(path)


def planned(lengths: str, *more: str) -> list[str]:
    return ["plan", lengths, *LOAD, PROFILE.name, "--confirm-duration", "0.5", *more]


def test_a_prediction_stands_beside_the_outcome_and_its_error_is_kept(
    server: CannedOpenAi, kept: Path, lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.key = "secret"
    given = ("--confirm-url", f"split 1:1={server.url}", "--confirm-key", "secret")
    told = _json(capsys, *planned(lengths, *given))
    assert told["past_errors"] == []
    [one] = told["confirmed"]
    assert one["system"].startswith("split 1:1 (steps of ")
    assert one["predicted"]["num_requests"] == one["outcome"]["num_requests"] > 5
    assert {len(body["prompt"]) for body in server.bodies} == {8, 200}
    assert {body["max_tokens"] for body in server.bodies} == {8, 3}
    ratio = one["predicted"]["ttft_mean_s"] / one["outcome"]["ttft_mean_s"]
    assert one["errors"]["ttft"] == pytest.approx(ratio - 1)
    assert not one["is_void"]
    # The next advice states it, and a line that is none of them is named and ignored.
    again = _json(capsys, *planned(lengths))
    assert [past["ttft"] for past in again["past_errors"]] == [one["errors"]["ttft"]]
    assert again["confirmed"] == []
    kept.write_bytes(kept.read_bytes() + b"\xff{hostile\n")
    before = kept.read_bytes()
    assert main(planned(lengths, *given)) == 0
    shown = capsys.readouterr()
    assert "line 2 is no error of a plan" in shown.err
    assert "error that such advice has had: none is known" in shown.out
    assert "prediction and outcome, of the same requests on engines:" in shown.out
    assert kept.read_bytes() == before


def _json(capsys: pytest.CaptureFixture[str], *argv: str) -> dict[str, Any]:
    assert main([*argv, "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (("--confirm", "--confirm-url", "split=http://x"), "not both"),
        (("--confirm-url", "http://x"), "write NAME=URL"),
        (("--confirm-url", "split 1:1=ftp://x"), "write NAME=URL"),
        (("--confirm-url", "split 2:2=http://x"), "no system is named split 2:2: 2 colocated"),
        (("--confirm", "--confirm-duration", "0.001"), "give a longer --confirm-duration"),
        (("--confirm", "--dilate", "0"), "--dilate 0: must be more than 0"),
    ],
)
def test_a_confirmation_that_cannot_be_is_refused_before_anything_runs(
    more: tuple[str, ...], words: str, lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(planned(lengths, *more)) == 2
    shown = capsys.readouterr()
    assert words in shown.err
    assert shown.err.count("\n") == 1


def test_a_server_that_fails_every_request_is_one_line(
    server: CannedOpenAi, kept: Path, lengths: str, capsys: pytest.CaptureFixture[str]
) -> None:
    server.answer = (503, b"no")
    assert main(planned(lengths, "--confirm-url", f"2 colocated={server.url}")) == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert f"every request to {server.url} failed, the first one by: HTTP 503: no" in last
    assert not kept.exists()


def test_errors_are_appended_and_told_in_one_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "errors.jsonl"
    assert read_errors(path) == ([], "")
    append_errors(path, [ERROR])
    append_errors(path, [replace_error(ttft=-0.3), replace_error(digest="other")])
    known = read_errors(path)
    assert len(known.errors) == 3
    assert past_words(known.of("d")) == (
        "error that such advice has had: TTFT 20.0% (worst 30.0%), TPOT 2.0% (worst 2.0%), goodput "
        "5.0 percentage points; 2 confirmed, the last one on 2026-11-29"
    )
    for foreign in (b'{"at": 1}\n', b"\x00\x01", b"[" * 100_000, b'{"x": 1}\n' * 600_000):
        path.write_bytes(foreign)
        found = read_errors(path)
        assert not found.errors
        assert found.problem.startswith(f"{path} is ignored: ")
    assert "is ignored" in read_errors(tmp_path).problem


def replace_error(**changes: Any) -> PastError:
    return PastError(**{name: getattr(ERROR, name) for name in ERROR.__struct_fields__} | changes)


def test_other_step_times_have_had_other_errors() -> None:
    device = Device(PROFILE)
    assert digest_of(device) == digest_of(Device(load(PROFILE.name)))
    slower = replace(PROFILE, prefill=replace(PROFILE.prefill, token_s=1e-3))
    assert digest_of(device) != digest_of(Device(slower))


def test_an_outcome_with_late_steps_is_void() -> None:
    place = Place(colocated(2, store=False))
    on_time, late = (
        Confirmation(place, {**FIGURES, "ttft_mean_s": 0.1}, EngineOutcome(FIGURES, share))
        for share in (0.03, 0.031)
    )
    assert not on_time.is_void
    assert late.is_void
    [words] = void_words([on_time, late])
    assert "void: 3.1% of the steps took longer than modelled (at most 3%)" in words
    assert confirmation_rows([on_time])[2][1:] == ("ttft mean, ms", "100", "200", "-50.0%")


def test_the_options_of_a_paced_system_are_those_of_serve() -> None:
    systems = [*fixed_candidates(2, True, 8192), elastic(2, PROFILE.name, LatencyLimits(1, 0.05))]
    for one in systems:
        # The port comes last, as a server for a benchmark gets it.
        config = parse_serve_argv([*paced_words(one, PROFILE.name, 8.0), "--port", "4321"])
        assert (config.port, config.pace, config.dilate) == (4321, PROFILE.name, 8.0)
        numbers = (config.prefill, config.decode, config.colocated)
        assert one.system.migration == "elastic" or numbers == (
            one.system.prefill,
            one.system.decode,
            one.system.colocated,
        )
        assert config.kv_store == one.has_store
        steps = ("--max-num-batched-tokens", str(one.step_tokens))
        assert config.orchestrator.is_elastic or config.vllm_argv == steps


def test_prompts_share_the_blocks_that_their_hash_ids_share() -> None:
    one, other, alone = (
        CaseRequest.of(SimRequest(n, 0.0, 1200, 5, ids), 3).prompt
        for n, ids in enumerate([(1, 2, 3), (1, 5, 6), ()])
    )
    assert {len(one), len(other), len(alone)} == {1200}
    assert one[:512] == other[:512]
    assert one[512:1024] != other[512:1024]
    assert alone[:512] != one[:512]
