"""The ``banaserve`` command: dispatch, errors as lines, exit codes."""

from __future__ import annotations

import io
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from types import ModuleType

import pytest

from banaserve.base.arguments import ABOVE_0, argument, option
from banaserve.base.errors import NoInstanceError, UserError
from banaserve.cli import main as cli
from banaserve.cli.app import App
from banaserve.cli.kvstore import store_rows
from banaserve.cli.terminal import console
from banaserve.cli.terminal.console import counting, print_error, print_rows
from banaserve.kvstore.stats import StoreStats


def install_command(monkeypatch, body, attribute="run"):
    module = ModuleType("banaserve_test_command")
    setattr(module, attribute, body)
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(cli.COMMANDS, "probe", cli.Command(module.__name__, attribute, "A probe."))


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"], ["help"]])
def test_help_lists_every_command(argv, capsys):
    assert cli.main(argv) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in cli.COMMANDS)


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        (["serv"], "there is no command serv: did you mean `banaserve serve`?"),
        (["xyzzy"], "there is no command xyzzy: see `banaserve --help`"),
        (["--port", "1"], "there is no command --port: see `banaserve --help`"),
        (["version", "all"], "version: unrecognized arguments: all (see banaserve version --help)"),
    ],
)
def test_a_mistake_gives_one_line_and_exit_code_2(argv, line, capsys):
    assert cli.main(argv) == cli.EXIT_USER_ERROR
    assert capsys.readouterr().err == f"banaserve: {line}\n"


def test_without_vllm_a_command_that_needs_it_says_so(monkeypatch, capsys):
    def run(argv):
        raise ModuleNotFoundError("No module named 'starlette'", name="starlette")

    install_command(monkeypatch, run)
    assert cli.main(["probe"]) == cli.EXIT_USER_ERROR
    said = " ".join(capsys.readouterr().err.split())
    assert said.startswith("banaserve: the package starlette is missing, which comes with vLLM")


def test_a_package_that_lacks_a_part_is_no_mistake_of_the_user(monkeypatch):
    def run(argv):
        raise ModuleNotFoundError("No module named 'starlette.x'", name="starlette.x")

    install_command(monkeypatch, run)
    with pytest.raises(ModuleNotFoundError):
        cli.main(["probe"])


@pytest.mark.parametrize("argv", [["doctor", "--nope"], ["doctor", "--port", "x"]])
def test_a_wrong_option_gives_one_line_and_exit_code_2(argv, capsys):
    assert cli.main(argv) == cli.EXIT_USER_ERROR
    error = capsys.readouterr().err
    assert error.startswith("banaserve: ")
    assert error.count("\n") == 1
    assert argv[1] in error


def test_the_rest_of_the_line_reaches_a_command_untouched(monkeypatch):
    seen = []
    install_command(monkeypatch, lambda argv: seen.append(argv) or 7)
    assert cli.main(["probe", "--help", "--", "--max-model-len", "8"]) == 7
    assert seen == [["--help", "--", "--max-model-len", "8"]]


@pytest.mark.parametrize(
    ("error", "code", "output"),
    [
        (UserError("no such\n  model"), 2, "banaserve: no such model\n"),
        (NoInstanceError("nobody serves"), 1, "banaserve: nobody serves\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_exit_codes(error, code, output, monkeypatch, capsys):
    def body(argv):
        raise error

    install_command(monkeypatch, body)
    assert cli.main(["probe"]) == code
    assert capsys.readouterr().err == output


def test_a_bug_keeps_its_traceback(monkeypatch):
    def body(argv):
        raise ZeroDivisionError

    install_command(monkeypatch, body)
    with pytest.raises(ZeroDivisionError):
        cli.main(["probe"])


@dataclass(frozen=True)
class ProbeOptions:
    code: int = argument("exit code", type=int)
    step_s: float = option("time of a step", 1.0, rule=ABOVE_0)
    names: tuple[str, ...] = option("names", (), name="--name")


def probe(asked: ProbeOptions) -> int:
    """Probe."""
    return asked.code


def test_a_command_gives_its_exit_code(monkeypatch):
    install_command(monkeypatch, App(probe), "app")
    assert cli.main(["probe", "3"]) == 3
    assert cli.main(["probe", "0", "--step", "2"]) == 0


def test_the_parameters_of_a_command_are_its_options_beside_those_that_it_shares(monkeypatch):
    def raised(asked: ProbeOptions, by: int = option("addend", 0), twice: bool = option("", False)):
        return (asked.code + by) * (2 if twice else 1)

    install_command(monkeypatch, App(raised), "app")
    assert cli.main(["probe", "3"]) == 3
    assert cli.main(["probe", "3", "--by", "4", "--twice"]) == 14


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "probe: the following arguments are required: code (see banaserve probe --help)"),
        (["3", "4"], "probe: unrecognized arguments: 4 (see banaserve probe --help)"),
        (
            ["3", "--nam", "x"],
            "probe: unrecognized arguments: --nam x; did you mean --name? (see banaserve probe "
            "--help)",
        ),
        (["3", "--step", "0"], "--step 0: must be more than 0"),
        (
            ["3", "--step", "x"],
            "probe: argument --step: invalid float value: 'x' (see banaserve probe --help)",
        ),
    ],
)
def test_a_wrong_word_is_one_line(argv, line, monkeypatch, capsys):
    install_command(monkeypatch, App(probe), "app")
    assert cli.main(["probe", *argv]) == cli.EXIT_USER_ERROR
    assert capsys.readouterr().err == f"banaserve: {line}\n"


@pytest.mark.parametrize(
    ("argv", "line"),
    [
        ([], "probe: a command is missing: give one of run"),
        (["ru"], "probe: there is no command ru: did you mean run?"),
        (["xyzzy"], "probe: there is no command xyzzy: give one of run"),
        (["--port", "1"], "probe: a command is missing: give one of run"),
    ],
)
def test_a_wrong_sub_command_is_one_line(argv, line, monkeypatch, capsys):
    install_command(monkeypatch, App(None, "Probe.", run=probe), "app")
    assert cli.main(["probe", "run", "3"]) == 3
    assert cli.main(["probe", *argv]) == cli.EXIT_USER_ERROR
    assert capsys.readouterr().err == f"banaserve: {line}\n"


def test_usage_marks_an_argument_that_may_be_left_out(capsys):
    with pytest.raises(SystemExit):
        cli.main(["chat", "--help"])
    assert capsys.readouterr().out.startswith("usage: banaserve chat [options] [question]\n")


def test_a_command_with_an_argument_may_have_sub_commands(monkeypatch, capsys):
    def run() -> int:
        """Run."""
        return 7

    install_command(monkeypatch, App(probe, "", run=run), "app")
    assert cli.main(["probe", "3"]) == 3
    assert cli.main(["probe", "run"]) == 7
    assert cli.main(["probe"]) == cli.EXIT_USER_ERROR
    assert "arguments are required: code" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["probe", "--help"])
    shown = capsys.readouterr().out
    assert shown.startswith("usage: banaserve probe [options] code")
    assert "run  Run." in shown


def test_version_names_what_is_installed(capsys):
    assert cli.main(["--version"]) == 0
    first, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("banaserve 0.")


@pytest.mark.parametrize(
    "argv", [("--help",), ("version",), ("simulate", "--list"), ("status", "--help")]
)
def test_a_reader_that_closes_the_pipe_ends_a_command_quietly(argv: tuple[str, ...]) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    command = [sys.executable, "-P", "-m", "banaserve", *argv]
    with os.fdopen(writer, "wb") as pipe:
        done = subprocess.run(command, stdout=pipe, stderr=subprocess.PIPE, text=True)
    assert done.stderr == ""
    assert done.returncode in (0, 141), "argparse ignores a closed pipe"


def test_help_and_doctor_import_nothing_heavy():
    body = (
        "import sys\n"
        "from banaserve.cli.main import main\n"
        "main(['--help'])\n"
        "import banaserve.cli.doctor.command\n"
        "print(sorted({'torch', 'vllm', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-P", "-c", body], capture_output=True, text=True)
    assert done.stdout.splitlines()[-1] == "[]", done.stderr


def test_rows_are_aligned_plain_lines_where_there_is_no_terminal(capsys):
    print_rows([("a", "OK", "fine"), ("long", "missing", "")], {"OK": "green"})
    assert capsys.readouterr().out == "a     OK       fine\nlong  missing\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_what_clients_name_controls_no_terminal(is_terminal, capsys, monkeypatch):
    """The id of a request is what its client says."""
    monkeypatch.setattr("sys.stdout.isatty", lambda: is_terminal)
    print_rows([("a\x1b]52;c;eA\x07\nb\x9b2J", "OK")], {})
    print_error("there is no request \x1b[2J")
    shown = capsys.readouterr()
    assert not {"\x1b", "\x07", "\x9b"} & {*shown.out, *shown.err}
    assert (shown.out.count("\n"), shown.err.count("\n")) == (1, 1)


@pytest.mark.parametrize("is_terminal", [True, False])
def test_seconds_count_on_a_terminal_only(is_terminal, monkeypatch):
    monkeypatch.setattr(console, "_TICK_S", 0.0)
    terminal, num_threads = io.StringIO(), threading.active_count()
    monkeypatch.setattr(terminal, "isatty", lambda: is_terminal)
    ticked = threading.Event()
    with counting(terminal, lambda _: ticked.set()) as stop:
        assert not is_terminal or ticked.wait(60)
        stop()
        assert (threading.active_count(), ticked.is_set()) == (num_threads, is_terminal)
    assert terminal.getvalue() == ("\033[K" if is_terminal else "")


@pytest.mark.parametrize(
    ("found", "asked", "new", "line"),
    [
        (0, 0, 0.0, "none asked"),
        (5, 10, 2.0, "50.0% of 10 blocks; an unlimited store would find about 80.0%"),
        # The number of new blocks is an estimate: no store finds less than this one.
        (5, 10, 6.5, "50.0% of 10 blocks; an unlimited store would find about 50.0%"),
    ],
)
def test_the_store_shows_its_hits_beside_those_of_an_unlimited_one(found, asked, new, line):
    numbers = {"found_blocks": found, "asked_blocks": asked, "new_blocks": new, "tiers": ()}
    stats = StoreStats(**dict.fromkeys(StoreStats.__struct_fields__, 0) | numbers)
    assert dict(store_rows(stats))["found for requests"] == line
