"""Progress of a server's operations: shown until their end, aborted by Ctrl-C."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from banaserve.base.errors import UserError
from banaserve.cli.terminal.console import print_error, print_json
from banaserve.frontdoor.admin_client import OperationClient

_LOOK_S = 0.5


class _Operation(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def is_open(self) -> bool: ...

    @property
    def state(self) -> str: ...


State = TypeVar("State", bound=_Operation)


def followed(
    operations: OperationClient[Any, State],
    begun: State,
    words: Callable[[State], str],
    *,
    is_silent: bool,
    aborts: bool = True,
) -> State:
    """Wait for the end of an operation and return its last state.

    Args:
        words: Returns the line that describes a state; a changed line is printed unless empty.
        is_silent: True if nothing is printed.
        aborts: True if Ctrl-C aborts the operation and waits for its end, instead of leaving it.

    Raises:
        UserError: The server cannot be reached.
    """
    state, said = begun, ""

    def say() -> None:
        nonlocal said
        if not is_silent and (line := words(state)) and line != said:
            said = line
            print(line, file=sys.stderr, flush=True)

    try:
        while state.is_open:
            say()
            state = operations.show(state.id, wait_s=_LOOK_S)
    except KeyboardInterrupt:
        if not aborts:
            raise
        with contextlib.suppress(UserError):  # it has ended meanwhile, or can no longer be undone
            operations.abort(state.id)
        while state.is_open:
            state = operations.show(state.id, wait_s=_LOOK_S)
    say()
    return state


def ended(
    operation: _Operation, as_json: bool, done: Sequence[str], failure: str, code: int = 2
) -> int:
    """Print the state of an operation, as JSON or in lines, and return the exit code.

    Args:
        done: Lines on an operation that was completed.
        failure: Error of one that was not.
        code: Exit code of one that was not.
    """
    if as_json:
        print_json(operation)
    elif operation.state == "done":
        print("\n".join(done))
    elif operation.is_open:
        print(f"{operation.id}: {operation.state}; `banaserve status` shows how far it is")
    if operation.is_open or operation.state == "done":
        return 0
    print_error(failure)
    return code
