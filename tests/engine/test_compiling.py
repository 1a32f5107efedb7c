"""When engines on a CPU compile the model."""

from __future__ import annotations

from pathlib import Path

import pytest

from banaserve.cli.serve.command_line import parse_serve_argv
from banaserve.cli.serve.machine import choose_compiling, find_compiler

CXX = "/usr/bin/g++"
OPTION = "--orchestrator-option"


@pytest.mark.parametrize(
    ("words", "compiler", "is_compiled", "reason"),
    [
        ("--instances 2 --elastic", CXX, True, "are away go without"),
        ("--instances 2", CXX, True, "are away go without"),
        ("--pd 1:1 --elastic", CXX, True, "are away go without"),
        ("--instances 2 --elastic", None, False, "no C++ compiler"),
        (f"--instances 2 {OPTION} modules=none", CXX, True, "are away go without"),
        (f"--instances 2 {OPTION} modules=layers", CXX, False, "may move"),
        ("--pd 1:1", CXX, False, "may move"),
        ("--colocated 2", CXX, False, "may move"),
        ("--instances 2 --orchestrator off", CXX, False, "may move"),
        ("--pd 1:1 --orchestrator on", CXX, False, "may move"),
        ("--instances 2 --elastic --pace opt-13b-a100", CXX, False, "modelled"),
    ],
)
def test_a_model_is_compiled_where_no_module_moves(
    words: str, compiler: str | None, is_compiled: bool, reason: str
) -> None:
    chosen = choose_compiling(parse_serve_argv(words.split()), compiler)
    assert chosen.is_compiled is is_compiled
    assert reason in chosen.reason
    assert str(chosen).startswith("compiled: " if is_compiled else "not compiled: ")


def test_the_compiler_is_the_one_that_the_environment_names(tmp_path: Path) -> None:
    own = tmp_path / "own-c++"
    own.write_text("#!/bin/sh\n")
    own.chmod(0o755)
    assert find_compiler({"CXX": str(own)}) == str(own)
    assert find_compiler({"CXX": str(tmp_path / "none")}) is None
