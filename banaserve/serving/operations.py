"""Long operations: numbered, run in tasks, remembered after their end, and abortable."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from typing import Any, Generic, Protocol, TypeVar

from banaserve.base.clock import Clock
from banaserve.base.errors import BanaServeError, MigrationError

logger = logging.getLogger(__name__)


class OperationState(Protocol):
    """State of one operation, as the admin API shows it.

    Attributes:
        seconds: Time since the operation began, or its duration once it has ended, in seconds.
    """

    id: str
    state: str
    seconds: float

    @property
    def is_open(self) -> bool: ...


State = TypeVar("State", bound=OperationState)


class OperationAbortedError(BanaServeError):
    """Error that ends an operation whose abort was requested."""


class Operations(Generic[State]):
    """Operations of one kind; a subclass begins them and carries them out.

    Args:
        noun: Name of such an operation in messages, such as ``scaling``.
        prefix: First letter of the operations' ids.
        num_kept: Number of operations that are remembered; older ones stay only while open.
    """

    def __init__(self, noun: str, prefix: str, clock: Clock, num_kept: int = 200) -> None:
        self._noun = noun
        self._prefix = prefix
        self._clock = clock
        self._num_kept = num_kept
        self._numbers = itertools.count(1)
        self._states: dict[str, State] = {}
        self._began_s: dict[str, float] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._aborting: set[str] = set()

    def get(self, operation_id: str) -> State | None:
        """Return the operation with this id; None if it is unknown or forgotten."""
        state = self._states.get(operation_id)
        return self._timed(state) if state is not None else None

    def recent(self) -> list[State]:
        """Return all remembered operations, the oldest first."""
        return [self._timed(state) for state in self._states.values()]

    @property
    def under_way(self) -> State | None:
        """First operation that has not ended; None if all have."""
        return next((state for state in self._states.values() if state.is_open), None)

    def abort(self, operation_id: str) -> State:
        """Ask for the end of an operation, and return without waiting for it.

        Raises:
            MigrationError: There is no such operation, or the operation has ended.
        """
        state = self._states.get(operation_id)
        if state is None:
            raise MigrationError(f"there is no {self._noun} {operation_id}")
        if not state.is_open:
            raise MigrationError(f"{self._noun} {operation_id} is {state.state}: nothing to abort")
        self._abort(state)
        return state

    async def wait(self, operation_id: str, timeout_s: float | None = None) -> State:
        """Return when the operation has ended, or after ``timeout_s`` seconds."""
        if task := self._tasks.get(operation_id):
            await asyncio.wait({task}, timeout=timeout_s)
        return self._timed(self._states[operation_id])

    async def stop(self) -> None:
        """Cancel all running operations at once."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    # ---- for subclasses

    def _new_id(self) -> str:
        return f"{self._prefix}{next(self._numbers)}"

    def _keep(self, state: State) -> None:
        """Remember a new operation; forget the oldest ones that have ended."""
        self._states[state.id] = state
        self._began_s[state.id] = self._clock.now()
        for old in list(self._states)[: -self._num_kept]:
            if not self._states[old].is_open:
                del self._states[old], self._began_s[old]

    def _carry_out(self, state: State, work: Coroutine[Any, Any, None]) -> None:
        """Start ``work`` in a task; its end is the end of the operation."""
        task = self._tasks[state.id] = asyncio.create_task(work)

        def ended(_: asyncio.Task[None]) -> None:
            self._tasks.pop(state.id, None)
            self._aborting.discard(state.id)

        task.add_done_callback(ended)

    def _abort(self, state: State) -> None:
        """Make ``_is_aborting`` true, which the operation's task checks."""
        self._aborting.add(state.id)

    def _is_aborting(self, state: State) -> bool:
        return state.id in self._aborting

    def _check_wanted(self, state: State) -> None:
        """Raise ``OperationAbortedError`` if the operation is to end."""
        if self._is_aborting(state):
            raise OperationAbortedError

    def _timed(self, state: State) -> State:
        """Update the time of an open operation, and return its state."""
        if state.is_open:
            state.seconds = self._clock.now() - self._began_s[state.id]
        return state

    async def _outcome(self, state: State, work: Coroutine[Any, Any, None]) -> tuple[str, str]:
        """Carry out ``work``; return the operation's final state and the reason for it."""
        try:
            await work
        except OperationAbortedError:
            return "aborted", ""
        except BanaServeError as failed:
            return "failed", str(failed)
        except Exception as broken:
            logger.exception("%s %s", self._noun, state.id)
            return "failed", f"{type(broken).__name__}: {broken}"
        return "done", ""
