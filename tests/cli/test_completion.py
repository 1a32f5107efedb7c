"""Completion of command lines: what is offered, and a shell that asks for it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from banaserve.cli.commands import COMMANDS, OFFERED_BY
from banaserve.cli.main import main
from banaserve.cli.terminal.completion import SCRIPTS, candidates


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        ((), {*COMMANDS, *OFFERED_BY}),
        (("se",), {"serve"}),
        (("serve", "--kv-store-s"), {"--kv-store-size", "--kv-store-ssd"}),
        (("serve", "--pd", "1:1", "--orchestrator", ""), {"off", "dry-run", "on"}),
        (("serve", "--migration", "o"), {"on", "off"}),
        (("doctor", "--"), {"--model", "--port", "--json", "--help"}),
        (("migrate", ""), {"layers", "heads"}),
        (("migrate", "layers", "--fr"), {"--from"}),
        (("bench", ""), {"serving", "compare", "report"}),
        (("bench", "serving", "--req"), {"--requests"}),
        (("bench", "compare", "--sys"), {"--system"}),
        (("bench", "report", "--t"), {"--title"}),
        (("route", "--rep"), {"--replica"}),
        (("completion", ""), set(SCRIPTS)),
    ],
)
def test_words_are_completed(words: Sequence[str], offered: set[str]) -> None:
    found = candidates(words)
    assert offered <= set(found)
    assert all(one.startswith(words[-1] if words else "") for one in found)


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--kv-store-ssd", ""),  # a folder: the shell's own completion
        ("doctor", "--cluster-key-file", "--"),
        ("nothing", ""),
        ("version", ""),
        ("serve", "--nothing-like-it"),
    ],
)
def test_where_nothing_is_known_shells_offer_files(words: Sequence[str]) -> None:
    assert candidates(words) == []


@pytest.mark.parametrize("name", [*COMMANDS, *OFFERED_BY])
def test_every_command_can_be_completed(name: str) -> None:
    candidates((name, ""))
    candidates((name, "--"))


@pytest.mark.parametrize("shell", SCRIPTS)
def test_the_script_is_what_its_shell_reads(
    shell: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["completion", shell]) == 0
    script = tmp_path / "script"
    script.write_text(capsys.readouterr().out)
    if not shutil.which(shell):
        pytest.skip(f"there is no {shell} here")
    subprocess.run([shell, "-n", str(script)], check=True)


def test_bash_offers_what_the_command_says(tmp_path: Path) -> None:
    command = tmp_path / "banaserve"
    command.write_text(f'#!/bin/sh\nexec {sys.executable} -P -m banaserve "$@"\n')
    command.chmod(0o755)
    asked = f"""PATH={tmp_path}:$PATH
source <(banaserve completion bash)
COMP_WORDS=(banaserve serve --orchestrator "") COMP_CWORD=3
_banaserve; echo "${{COMPREPLY[@]}}"
COMP_WORDS=(banaserve dri) COMP_CWORD=1
_banaserve; echo "${{#COMPREPLY[@]}}"
COMP_WORDS=(banaserve sta) COMP_CWORD=1
_banaserve; echo "${{COMPREPLY[@]}}"
complete -p banaserve"""
    done = subprocess.run(["bash", "-c", asked], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [
        "off dry-run on",
        "0",
        "status",
        "complete -o default -F _banaserve banaserve",
    ]


@pytest.mark.parametrize("argv", [[], ["tcsh"], ["bash", "zsh"]])
def test_another_shell_is_one_line(argv: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", *argv]) == 2
    error = capsys.readouterr().err
    assert error.startswith("banaserve: completion: name one shell of bash, zsh, fish")
    assert error.count("\n") == 1


def test_help_says_where_the_script_belongs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["completion", "--help"]) == 0
    shown = capsys.readouterr().out
    assert all(f"banaserve completion {shell}" in shown for shell in SCRIPTS)
