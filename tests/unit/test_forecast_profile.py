"""Profile that a server forecasts with: never that of another model or device."""

from __future__ import annotations

import pytest

from banaserve import models
from banaserve.cli.main import main
from banaserve.cli.serve.options.command_line import parse_serve_argv
from banaserve.elastic.forecast_profile import forecast_profile
from banaserve.errors import UserError

OWN = ("--orchestrator-option", "profile=llama-3.1-8b-h100")


@pytest.mark.parametrize(
    ("argv", "on_cpu", "profile"),
    [
        ((), True, "smollm2-135m-cpu"),
        (("--pace", "opt-13b-a100"), True, "opt-13b-a100"),
        (("other/model", "--pace", "opt-13b-a100"), True, "opt-13b-a100"),
        (("other/model", *OWN), True, "llama-3.1-8b-h100"),
        (("other/model", *OWN), False, "llama-3.1-8b-h100"),
        (("--pace", "opt-13b-a100", *OWN), True, "llama-3.1-8b-h100"),
    ],
)
def test_the_profile_is_the_one_given_or_of_what_serves(argv, on_cpu, profile):
    assert forecast_profile(parse_serve_argv([*argv, "--elastic"]), on_cpu) == profile


@pytest.mark.parametrize(
    ("argv", "on_cpu", "words"),
    [
        (("other/model",), True, "no step times of other/model on a CPU"),
        ((), False, "no step times of smollm2-135m on this device"),
    ],
)
def test_no_profile_stands_in_for_another(argv, on_cpu, words):
    config = parse_serve_argv([*argv, "--elastic"])
    with pytest.raises(UserError, match=words):
        forecast_profile(config, on_cpu)


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        (["other/model", "--elastic"], "give --orchestrator-option profile=NAME (llama-13b-a100,"),
        (["other/model", "--orchestrator-policy", "elastic"], "no step times of other/model"),
        (["--elastic", "--orchestrator-option", "profile=a10"], "unknown profile: a10"),
        (["--elastic", "--orchestrator-option", "profile=no.toml"], "cannot read no.toml"),
    ],
)
def test_a_server_without_a_profile_is_refused_before_anything_starts(
    argv, words, capsys, monkeypatch
):
    monkeypatch.setattr(models, "resolve", None)
    assert main(["serve", *argv]) == 2
    (line,) = capsys.readouterr().err.strip().splitlines()
    assert words in line
