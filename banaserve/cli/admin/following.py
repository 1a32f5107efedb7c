"""Progress of a server's operations: shown until their end, aborted by Ctrl-C."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable
from typing import Any, Protocol, TypeVar

from banaserve.api.admin_client import OperationClient
from banaserve.errors import UserError

_LOOK_S = 0.5


class _Operation(Protocol):
    @property
    def id(self) -> str: ...

    @property
    def is_open(self) -> bool: ...


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
