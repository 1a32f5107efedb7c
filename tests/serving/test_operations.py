"""Ends of operations: what the admin API shows for each way in which the work may end."""

from __future__ import annotations

import asyncio
from typing import Any

import msgspec
import pytest

from banaserve.base.clock import WallClock
from banaserve.base.errors import InstanceDeadError, MigrationError
from banaserve.serving.operation_base import OperationAbortedError, Operations


class Shown(msgspec.Struct):
    id: str
    state: str = "running"
    seconds: float = 0.0
    reason: str = ""

    @property
    def is_open(self) -> bool:
        return self.state == "running"


class Waits(Operations[Shown]):
    """Operations that end when ``go_on`` is set, with ``error`` if it is given."""

    def __init__(self, num_kept: int = 200) -> None:
        super().__init__("wait", "w", WallClock(), num_kept)
        self.go_on = asyncio.Event()

    def begin(self, error: BaseException | None = None) -> Shown:
        state = Shown(self._new_id())
        self._carry_out(state, self._work(state, error))
        return state

    async def _work(self, state: Shown, error: BaseException | None) -> None:
        await self.go_on.wait()
        self._check_wanted(state)
        if error is not None:
            raise error


class CancelledWaits(Waits):
    def _abort(self, state: Shown) -> None:
        self._cancel(state)


@pytest.mark.parametrize(
    ("error", "ending", "reason"),
    [
        (None, "done", ""),
        (MigrationError("no room"), "failed", "no room"),
        (InstanceDeadError("p0 has ended"), "failed", "p0 has ended"),
        (KeyError("a"), "failed", "KeyError: 'a'"),
        (OperationAbortedError(), "aborted", ""),
        (OperationAbortedError("3 are left", "timed out"), "timed out", "3 are left"),
    ],
)
async def test_how_operations_end(error: Any, ending: str, reason: str) -> None:
    waits = Waits()
    state = waits.begin(error)
    assert (waits.under_way, waits.is_under_way) == (state, True)
    assert (await waits.wait(state.id, 0.0)).is_open
    waits.go_on.set()
    assert await waits.wait(state.id) is state
    assert (state.state, state.reason, waits.is_under_way) == (ending, reason, False)
    with pytest.raises(MigrationError, match=f"wait {state.id} is {ending}: nothing to abort"):
        waits.abort(state.id)


@pytest.mark.parametrize("kind", [Waits, CancelledWaits])
async def test_an_abort_ends_one_operation(kind: type[Waits]) -> None:
    waits = kind()
    first, second = waits.begin(), waits.begin()
    await asyncio.sleep(0)  # both tasks begin
    assert waits.abort(first.id) is first
    waits.go_on.set()
    for one in (first, second):
        await waits.wait(one.id)
    assert [(one.state, one.reason) for one in waits.recent()] == [("aborted", ""), ("done", "")]
    with pytest.raises(MigrationError, match="there is no wait w9"):
        waits.abort("w9")


async def test_the_end_of_the_server_ends_all() -> None:
    waits = Waits()
    states = [waits.begin() for _ in range(3)]
    await asyncio.sleep(0)  # all tasks begin
    await waits.stop()
    assert {(one.state, one.reason) for one in states} == {("aborted", "the server stops")}


async def test_only_the_last_ended_operations_are_remembered() -> None:
    waits = Waits(num_kept=2)
    waits.go_on.set()
    for _ in range(4):
        last = waits.begin()
        await waits.wait(last.id)
    assert [one.id for one in waits.recent()] == ["w3", "w4"]
    assert waits.get("w1") is None
