"""Long operations: numbered, run in tasks, remembered after their end, and abortable.

A subclass checks a request, makes a state with ``_new_id``, and gives it to ``_carry_out`` with the
work to do. The operation's end follows from the end of the work, the same for all kinds:

    the work returns                      done
    it raises OperationAbortedError       aborted, or the state that the error names
    it raises any other error             failed, with the error as the reason
    the task is cancelled by an abort     aborted
    the task is cancelled by ``stop``     aborted, because the server stops
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Coroutine
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from banaserve.base.clock import Clock
from banaserve.base.errors import BanaServeError, MigrationError
from banaserve.base.tasks import end_tasks

logger = logging.getLogger(__name__)


class OperationState(Protocol):
    """State of one operation, as the admin API shows it.

    Attributes:
        state: Word for the present state; ``is_open`` is true for the states before the end.
        seconds: Time since the operation began, or its duration once it has ended, in seconds.
        reason: Reason why the operation is not done; empty if it is done or has not ended.
    """

    id: str
    state: str
    seconds: float
    reason: str

    @property
    def is_open(self) -> bool: ...


State = TypeVar("State", bound=OperationState)


class OperationAbortedError(BanaServeError):
    """Error that ends an operation in the state ``ending``, on request or because of a limit."""

    def __init__(self, reason: str = "", ending: str = "aborted") -> None:
        super().__init__(reason)
        self.ending = ending


@dataclass(slots=True)
class _Run(Generic[State]):
    """One operation; ``task`` is None if there was nothing to do."""

    state: State
    began_s: float
    task: asyncio.Task[None] | None = None
    is_aborting: bool = False
    abort_reason: str = ""


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
        self._runs: dict[str, _Run[State]] = {}

    def get(self, operation_id: str) -> State | None:
        """Return the operation with this id; None if it is unknown or forgotten."""
        run = self._runs.get(operation_id)
        return self._timed(run.state) if run is not None else None

    def recent(self) -> list[State]:
        """Return all remembered operations, the oldest first."""
        return [self._timed(run.state) for run in self._runs.values()]

    @property
    def under_way(self) -> State | None:
        """First operation that has not ended; None if all have."""
        return next((run.state for run in self._runs.values() if run.state.is_open), None)

    @property
    def is_under_way(self) -> bool:
        """True if an operation has not ended."""
        return self.under_way is not None

    def abort(self, operation_id: str, reason: str = "") -> State:
        """Ask for the end of an operation, and return without waiting for it.

        Args:
            reason: Reason of the abort, for people; empty if a person requests it.

        Raises:
            MigrationError: There is no such operation, it has ended or can be aborted no more.
        """
        if (run := self._runs.get(operation_id)) is None:
            raise MigrationError(f"there is no {self._noun} {operation_id}")
        state = run.state
        if not state.is_open:
            raise MigrationError(f"{self._noun} {operation_id} is {state.state}: nothing to abort")
        self._abort(state)
        run.is_aborting, run.abort_reason = True, reason
        return state

    async def wait(self, operation_id: str, timeout_s: float | None = None) -> State:
        """Return when the operation has ended, or after ``timeout_s`` seconds."""
        run = self._runs[operation_id]
        if run.task is not None:
            await asyncio.wait({run.task}, timeout=timeout_s)
        return self._timed(run.state)

    async def stop(self) -> None:
        """Cancel all running operations at once."""
        await end_tasks(*(run.task for run in self._runs.values()))

    # ---- for subclasses

    def _new_id(self) -> str:
        return f"{self._prefix}{next(self._numbers)}"

    def _keep(self, state: State) -> _Run[State]:
        """Remember a new operation; forget the oldest ones that have ended."""
        run = self._runs[state.id] = _Run(state, self._clock.now())
        for old in list(self._runs)[: -self._num_kept]:
            if not self._runs[old].state.is_open:
                del self._runs[old]
        return run

    def _carry_out(self, state: State, work: Coroutine[Any, Any, None]) -> None:
        """Remember a new operation, and start ``work`` in a task."""
        self._keep(state).task = asyncio.create_task(self._run(state, work))

    async def _run(self, state: State, work: Coroutine[Any, Any, None]) -> None:
        ending, reason = "aborted", "the server stops"
        try:
            await work
            ending, reason = "done", ""
        except asyncio.CancelledError:
            if not self._is_aborting(state):
                raise
            reason = self._runs[state.id].abort_reason
        except Exception as error:
            ending, reason = self._ending_of(state, error)
        finally:
            self._timed(state)
            self._end(state, ending, reason)

    def _ending_of(self, state: State, error: Exception) -> tuple[str, str]:
        """Return the final state and the reason of an operation that ends with ``error``."""
        if isinstance(error, OperationAbortedError):
            return error.ending, str(error) or self._runs[state.id].abort_reason
        if isinstance(error, BanaServeError):
            return "failed", str(error)
        logger.error("%s %s", self._noun, state.id, exc_info=error)
        return "failed", f"{type(error).__name__}: {error}"

    def _end(self, state: State, ending: str, reason: str) -> None:
        """Record the end of an operation; a subclass may count it and clear what it shows."""
        state.state, state.reason = ending, reason

    def _abort(self, state: State) -> None:
        """Act on an abort at once; the operation's task learns of it by ``_check_wanted``.

        Raises:
            MigrationError: It is too late: the operation continues.
        """

    def _cancel(self, state: State) -> None:
        """Cancel the operation's task where it waits; with an abort the end is ``aborted``."""
        if (task := self._runs[state.id].task) is not None:
            task.cancel()

    def _is_aborting(self, state: State) -> bool:
        return self._runs[state.id].is_aborting

    def _forget_abort(self, state: State) -> None:
        """Let an aborted operation do more work before its end."""
        self._runs[state.id].is_aborting = False

    def _check_wanted(self, state: State) -> None:
        """Raise ``OperationAbortedError`` if the operation is to end."""
        if self._is_aborting(state):
            raise OperationAbortedError

    def _timed(self, state: State) -> State:
        """Update the time of an open operation, and return its state."""
        if state.is_open:
            state.seconds = self._clock.now() - self._runs[state.id].began_s
        return state
