"""What ranks say, as of one host: it is as far as its slowest, and fails with any of them."""

from __future__ import annotations

import itertools
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

pytest.importorskip("vllm")

import migration_doubles as doubles
from banaserve.contracts.move_phase import MovePhase
from banaserve.migration.ranks import OTHER_FAILED
from banaserve.migration.worker_api import (
    GuestLinkStatus,
    HostStatus,
    LinkState,
    MoveFacts,
    MoveReport,
)
from banaserve.serving.moves import rank_reports

PHASES = list(MovePhase)


def move(phase: MovePhase, reason: str = "", dirty: int | None = None, **facts: Any) -> MoveReport:
    return MoveReport("m1", "m1", phase, "g1", reason, dirty, MoveFacts(**facts))


def status(**fields: Any) -> HostStatus:
    plain = doubles.Engine()._status()["value"]
    told = msgspec.convert(plain, HostStatus)
    kv = msgspec.structs.replace(told.kv, **fields.pop("kv", {}))
    return msgspec.structs.replace(told, kv=kv, **fields)


@given(st.lists(st.sampled_from(PHASES), min_size=1, max_size=4))
def test_a_move_is_as_far_as_its_slowest_rank(phases: list[MovePhase]) -> None:
    found = rank_reports.move_of([move(phase) for phase in phases]).phase
    if MovePhase.FAILED in phases:
        assert found is MovePhase.FAILED
    elif MovePhase.ABORTED in phases:
        assert found is MovePhase.ABORTED
    else:
        assert found is min(phases, key=PHASES.index)


def test_a_move_fails_for_the_reason_of_the_rank_that_has_one() -> None:
    told = [move(MovePhase.FAILED, OTHER_FAILED), move(MovePhase.FAILED, "no room")]
    for order in itertools.permutations(told):
        assert rank_reports.move_of(order).reason == "no room"
    assert rank_reports.move_of([told[0], move(MovePhase.PREPARED)]).reason == OTHER_FAILED


def test_bytes_are_those_of_all_and_times_the_longest() -> None:
    told = [
        move(MovePhase.COPIED, dirty=3, precopy_bytes=100, precopy_s=0.5, prepare_s=1.0),
        move(MovePhase.COPIED, dirty=5, precopy_bytes=150, precopy_s=0.2),
    ]
    found = rank_reports.move_of(told)
    assert found.dirty_blocks == 5
    assert (found.facts.precopy_bytes, found.facts.precopy_s) == (250, 0.5)
    assert found.facts.prepare_s == 1.0
    assert found.facts.stall_s is None
    assert rank_reports.move_of([move(MovePhase.PREPARED)]).dirty_blocks is None


def test_a_guest_is_ready_when_all_of_its_processes_are() -> None:
    ready, lost = GuestLinkStatus(LinkState.READY), GuestLinkStatus(LinkState.LOST, "killed")
    coming = GuestLinkStatus(LinkState.CONNECTING)
    for told, state in (
        ([ready, ready], LinkState.READY),
        ([ready, coming], LinkState.CONNECTING),
        ([lost, coming], LinkState.LOST),
    ):
        found = rank_reports.status_of([status(guests={"g": one}) for one in told])
        assert found.guests["g"].state is state
        assert found.guests["g"].reason == ("killed" if state is LinkState.LOST else "")
    found = rank_reports.status_of([status(guests={"g": ready}), status()])
    assert found.guests == {"g": ready}


def test_memory_is_that_of_all_and_the_pool_has_what_all_have() -> None:
    told = [
        status(kv={"page_bytes": 100, "resident_bytes": 7, "blocks_gained": 4}, steps_lost=1),
        status(kv={"page_bytes": 100, "resident_bytes": 8, "blocks_gained": 3}, steps_lost=2),
    ]
    found = rank_reports.status_of(told)
    assert (found.kv.page_bytes, found.kv.resident_bytes) == (200, 15)
    assert found.kv.blocks_gained == 3
    assert found.steps_lost == 2
    one = status()
    assert rank_reports.status_of([one]) == one
