"""Progress of a server's operations: shown until their end, aborted by Ctrl-C."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, TypeVar

from banaserve.base.errors import UserError
from banaserve.cli.admin.options import JsonOptions
from banaserve.cli.terminal.console import print_error, print_json
from banaserve.contracts.instances import NodeChange, RoleChange, Scaling
from banaserve.contracts.migration_api import Migration
from banaserve.contracts.restart_api import RollingRestart
from banaserve.frontdoor.admin_client import OperationClient

_LOOK_S = 0.5
State = TypeVar("State", Migration, NodeChange, RoleChange, RollingRestart, Scaling)


def follow(
    asked: JsonOptions,
    operations: OperationClient[Any, State],
    begun: State,
    *,
    progress: Callable[[State], str],
    done: Callable[[State], str],
    failure: Callable[[State], str],
    waits: bool = True,
    aborts: bool = True,
    code: int = 2,
) -> int:
    """Wait for the end of an operation, print the operation, and return the exit code.

    Args:
        progress: Returns the line that describes a state; a changed line is printed unless empty.
        done: Returns the lines on an operation that was completed.
        failure: Returns the error of one that was not.
        waits: False to return at once.
        aborts: True if Ctrl-C aborts the operation and waits for its end, instead of leaving it.
        code: Exit code of an operation that was not completed.

    Raises:
        UserError: The server cannot be reached.
    """
    state, said = begun, ""

    def say() -> None:
        nonlocal said
        if not asked.as_json and (line := progress(state)) and line != said:
            said = line
            print(line, file=sys.stderr, flush=True)

    try:
        while waits and state.is_open:
            say()
            state = operations.show(state.id, wait_s=_LOOK_S)
    except KeyboardInterrupt:
        if not aborts:
            raise
        with contextlib.suppress(UserError):  # it has ended meanwhile, or can no longer be undone
            operations.abort(state.id)
        while state.is_open:
            state = operations.show(state.id, wait_s=_LOOK_S)
    if waits:
        say()
    if asked.as_json:
        print_json(state)
    elif state.state == "done":
        print(done(state))
    elif state.is_open:
        print(f"{state.id}: {state.state}; `banaserve status` shows how far it is")
    if state.is_open or state.state == "done":
        return 0
    print_error(failure(state))
    return code
