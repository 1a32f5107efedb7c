"""Commands that follow an operation: what Ctrl-C leaves, what status says of its end."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from rich.console import Console

from banaserve.cli.admin import status
from banaserve.cli.admin.migrate import _migrate
from banaserve.cli.admin.operations import begin, follow
from banaserve.cli.admin.options import JsonOptions
from banaserve.cli.admin.status import move_rows
from banaserve.cli.main import main
from banaserve.contracts.control_api import (
    ControllerState,
    ControllerStatus,
    MoveLine,
    ServerStatus,
)
from banaserve.contracts.instances import RoleChange
from banaserve.contracts.migration_api import Migration, MoveLayers
from banaserve.contracts.restart_api import RollingRestart


class Interrupted:
    """Operations of a server; Ctrl-C comes at the first call named ``at``."""

    def __init__(self, at: str, ended: Any = None) -> None:
        self.at, self.ended = at, ended

    def begin(self, _: object) -> Any:
        return self._answer("begin")

    def show(self, _: str, wait_s: float) -> Any:
        return self._answer("show")

    def abort(self, _: str) -> None:
        self.at = ""

    def _answer(self, call: str) -> Any:
        if call == self.at:
            raise KeyboardInterrupt
        return self.ended


def never(_: object) -> NoReturn:
    raise AssertionError("the operation has not ended")


def test_an_interrupt_before_the_answer_says_that_the_server_may_have_begun(capsys: Any) -> None:
    with pytest.raises(KeyboardInterrupt):
        begin(Interrupted("begin"), None)  # type: ignore[arg-type]
    assert "whether the server has begun" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("is_terminal", "lines"),
    [(True, ["running, 0 s", "running, 7 s", "done"]), (False, ["running", "done"])],
)
def test_seconds_are_part_of_the_progress_on_a_terminal_only(
    is_terminal: bool, lines: list[str], monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    begun, later, ended = (
        RollingRestart("e1", state, [], seconds=seconds)
        for state, seconds in (("running", 0.2), ("running", 7.1), ("done", 9.0))
    )
    shown, operations = iter([later, ended]), Interrupted("never")
    monkeypatch.setattr(operations, "show", lambda *_, **__: next(shown))
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_terminal)
    told = {"progress": lambda one: one.state, "done": str, "failure": never}
    assert follow(JsonOptions(), operations, begun, **told) == 0  # type: ignore[arg-type]
    assert capsys.readouterr().err.splitlines() == lines


def test_an_interrupt_that_aborts_nothing_says_that_the_operation_continues(capsys: Any) -> None:
    running = RollingRestart("e1", "running", [])
    with pytest.raises(KeyboardInterrupt):
        follow(
            JsonOptions(),
            Interrupted("show"),  # type: ignore[arg-type]
            running,
            progress=str,
            done=never,
            failure=never,
            aborts=False,
        )
    assert "banaserve: e1 continues" in capsys.readouterr().err


def test_a_move_that_ctrl_c_aborts_was_aborted_by_hand(
    monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    begun, ended = (
        Migration("m1", "layers", "p0", "d0", one, []) for one in ("running", "aborted")
    )
    migrations = Interrupted("show", ended)
    monkeypatch.setattr(migrations, "begin", lambda _: begun)
    monkeypatch.setattr(JsonOptions, "client", lambda _: Client(migrations))
    assert _migrate(JsonOptions(), MoveLayers("p0", "d0", (0, 1))) == 2
    assert "migration m1 aborted: by hand" in capsys.readouterr().err


class Client:
    def __init__(self, migrations: Interrupted) -> None:
        self.migrations = migrations


@pytest.mark.parametrize(("ending", "code"), [("aborted", 0), ("failed", 1)])
def test_an_abort_has_succeeded_if_the_restart_is_aborted(
    ending: str, code: int, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    ended = RollingRestart("e1", ending, [], reason="why")
    restarts: Any = Interrupted("never", ended)
    restarts.last = lambda: [RollingRestart("e1", "running", [])]
    monkeypatch.setattr(JsonOptions, "client", lambda _: SimpleNamespace(restarts=restarts))
    assert main(["restart", "--abort"]) == code
    shown = capsys.readouterr()
    assert f"the restart {ending}: why" in (shown.err if code else shown.out)


def test_status_shows_no_control_characters(capsys: pytest.CaptureFixture[str]) -> None:
    hostile = "a\x1b]52;c;eA\x07"
    moves = [MoveLine("m1", "failed", hostile, 1.0, "")]
    controller = ControllerStatus(ControllerState.RUNNING, "on", hostile, 1.0)
    found = ServerStatus(0.0, [], moves, controller)
    status._print(found, as_json=False)
    Console(width=200).print(status._screen(found))
    shown = capsys.readouterr().out
    assert shown.count("a\N{REPLACEMENT CHARACTER}]52") == 4
    assert "\x1b" not in shown


def test_status_keeps_an_error_apart_from_what_failed() -> None:
    (row,) = move_rows([MoveLine("e1", "1 of 4 engines replaced", "aborted", 1.0, "by hand")])
    assert row[-1] == "1 of 4 engines replaced: by hand"
    (row,) = move_rows([MoveLine("m1", "d0 to p0: layers", "done")])
    assert row[-1] == "d0 to p0: layers"


def test_a_switch_that_has_ended_has_no_requests_left() -> None:
    switch = RoleChange("r1", "p1", "prefill", "decode", "draining", num_left=8)
    assert str(switch) == "p1 from prefill to decode, 8 left"
    switch.state = "done"
    assert str(switch) == "p1 from prefill to decode"


@pytest.mark.parametrize(
    ("command", "rule"),
    [
        ("drain d0 --timeout -1", "must not be negative"),
        ("restart --rolling --timeout -1", "must not be negative"),
        ("role d0 both --timeout 0", "must be more than 0"),
        ("scale --pd 1:1 --timeout 0", "must be more than 0"),
        ("nodes remove a:1 --timeout 0", "must be more than 0"),
    ],
)
def test_a_time_limit_that_is_none_is_refused_before_the_server_is_asked(
    command: str, rule: str, capsys: Any
) -> None:
    assert main(command.split()) == 2
    assert f"--timeout {command.split()[-1]}: {rule}" in capsys.readouterr().err
