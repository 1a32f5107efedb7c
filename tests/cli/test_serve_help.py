"""`banaserve serve --help` fits a screen; every option is on the page of its group."""

from __future__ import annotations

import re

import pytest

from banaserve.cli.main import main
from banaserve.cli.serve import command_line
from banaserve.cli.serve.command_line import COMMON

SCREEN_LINES = 50


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    with pytest.raises(SystemExit) as end:
        main(["serve", *words])
    assert end.value.code in (0, None)
    printed = capsys.readouterr()
    assert printed.err == ""
    return printed.out


@pytest.mark.parametrize("word", ["--help", "-h"])
def test_the_common_options_fit_a_screen(
    word: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    page = shown(capsys, word)
    assert page.count("\n") < SCREEN_LINES
    assert max(map(len, page.splitlines())) <= 80
    names = [name for names in COMMON.values() for name in names]
    assert len(names) == 15
    assert re.findall(r"^  (--[a-z-]+)", page, re.MULTILINE) == names


def test_every_option_is_on_the_page_of_one_group(capsys: pytest.CaptureFixture[str]) -> None:
    parser = command_line.make_parser()
    pages = [shown(capsys, f"--help={group}") for group in parser.groups]
    whole = shown(capsys, "--pd", "1:1", "--help=all")
    for group in parser.groups.values():
        for option in group:
            name = option.option_strings[-1]
            found = re.compile(rf"^  (?:\S+, )?{name}[ \[\n]", re.MULTILINE)
            assert sum(bool(found.search(page)) for page in pages) == 1, name
            assert found.search(whole), name


def test_every_option_says_what_it_is_with_unit_and_default(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    page = " ".join(shown(capsys, "--help=all").split())
    assert "SUPPRESS" not in page
    for option in (one for group in command_line.make_parser().groups.values() for one in group):
        name = option.option_strings[-1]
        assert option.help, name
        assert len(option.help.split()) >= 3, name
        if option.dest.endswith(("_s", "_stall")):
            assert option.metavar == "SECONDS", name
        if isinstance(option.default, float) and option.default:
            assert f"({option.default:g})" in page, name


def test_a_group_that_is_not_there_is_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--help=stor"]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert "did you mean store?" in error


def test_version_has_help(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="0"):
        main(["version", "--help"])
    assert capsys.readouterr().out.startswith("usage: banaserve version [options]\n")
