"""Profile that a server forecasts with: one that was asked for, or what instances have learnt."""

from __future__ import annotations

import pytest

from banaserve.base import models
from banaserve.cli.main import main
from banaserve.cli.serve.command_line import parse_serve_argv
from banaserve.orchestrator.planner.forecast_profile import forecast_profile

OWN = ("--orchestrator-option", "profile=llama-3.1-8b-h100")


@pytest.mark.parametrize(
    ("argv", "profile"),
    [
        ((), ""),
        (("other/model",), ""),
        (("--pace", "opt-13b-a100"), "opt-13b-a100"),
        (("other/model", "--pace", "opt-13b-a100"), "opt-13b-a100"),
        (("other/model", *OWN), "llama-3.1-8b-h100"),
        (("--pace", "opt-13b-a100", *OWN), "llama-3.1-8b-h100"),
    ],
)
def test_the_profile_is_the_one_given_and_no_other(argv, profile):
    assert forecast_profile(parse_serve_argv([*argv, "--elastic"])) == profile


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["--elastic", "--orchestrator-option", "profile=a10"], "unknown profile: a10"),
        (["--elastic", "--orchestrator-option", "profile=no.toml"], "cannot read no.toml"),
        (
            ["other/model", "--elastic", "--orchestrator-option", "modules=layers"],
            "give profile=NAME (llama-13b-a100,",
        ),
    ],
)
def test_a_server_that_needs_another_profile_is_refused_before_anything_starts(
    argv, words, capsys, monkeypatch
):
    monkeypatch.setattr(models, "resolve", None)
    assert main(["serve", *argv]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line
