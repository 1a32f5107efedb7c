"""Merging of the reports of one host's tensor-parallel ranks into one: pure functions."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from banaserve.contracts.move_phase import MovePhase
from banaserve.migration.ranks import OTHER_FAILED
from banaserve.migration.worker_api import (
    CommitReport,
    GuestLinkStatus,
    HostStatus,
    KvStatus,
    LinkState,
    MoveFacts,
    MoveReport,
)

T = TypeVar("T")
_WORST_FIRST = (MovePhase.FAILED, MovePhase.ABORTED, *MovePhase)
"""Phases in the order in which they win a merge: a move is as far as its least advanced rank."""
_LINKS = (LinkState.LOST, LinkState.CONNECTING, LinkState.READY)


def reason_of(refusals: Iterable[str]) -> str:
    """Return the most specific refusal: the others only say that another rank has failed."""
    told = list(refusals)
    return next((reason for reason in told if OTHER_FAILED not in reason), told[0])


def together(told: Sequence[T]) -> T:
    """Return one reply for those of all ranks: reports are merged, all other replies are equal."""
    merge = _MERGES.get(type(told[0]))
    return merge(told) if merge is not None else told[0]


def move_of(told: Sequence[MoveReport]) -> MoveReport:
    """Merge the reports of one move: it is as far as its least advanced rank."""
    least = min(told, key=lambda one: _WORST_FIRST.index(one.phase))
    reasons = [one.reason for one in told if one.reason]
    dirty = [one.dirty_blocks for one in told if one.dirty_blocks is not None]
    return msgspec.structs.replace(
        least,
        reason=reason_of(reasons) if reasons else "",
        dirty_blocks=max(dirty, default=None),
        facts=_facts_of([one.facts for one in told]),
    )


def _facts_of(told: Sequence[MoveFacts]) -> MoveFacts:
    """Merge measurements: bytes are summed; of times and counts the maximum is taken."""
    found: dict[str, int | float] = {}
    measured = [one.measured() for one in told]
    for name in dict.fromkeys(name for facts in measured for name in facts):
        values = [facts[name] for facts in measured if name in facts]
        found[name] = sum(values) if name.endswith("_bytes") else max(values)
    return msgspec.convert(found, MoveFacts)


def commit_of(told: Sequence[CommitReport]) -> CommitReport:
    return CommitReport(move_of([one.move for one in told]), told[0].epoch)


def status_of(told: Sequence[HostStatus]) -> HostStatus:
    """Merge the statuses of one host: all ranks have the same units; else the worst rank counts."""
    first = told[0]
    return msgspec.structs.replace(
        first,
        guests=_by_name([one.guests for one in told], _link_of),
        moves=_by_name([one.moves for one in told], move_of),
        guests_lost=max(one.guests_lost for one in told),
        steps_lost=max(one.steps_lost for one in told),
        kv=_kv_of([one.kv for one in told]),
    )


def _by_name(told: Sequence[Mapping[str, T]], together: Callable[[Sequence[T]], T]) -> dict[str, T]:
    names = dict.fromkeys(name for one in told for name in one)
    return {name: together([one[name] for one in told if name in one]) for name in names}


def _link_of(told: Sequence[GuestLinkStatus]) -> GuestLinkStatus:
    worst = min(told, key=lambda one: _LINKS.index(one.state))
    reasons = [one.reason for one in told if one.reason]
    return msgspec.structs.replace(
        worst,
        reason=reason_of(reasons) if reasons else "",
        round_trips=max(one.round_trips for one in told),
        share=min(one.share for one in told),
        num_passed=sum(one.num_passed for one in told),
    )


def _kv_of(told: Sequence[KvStatus]) -> KvStatus:
    resident = [one.resident_bytes for one in told if one.resident_bytes is not None]
    return msgspec.structs.replace(
        told[0],
        max_blocks=min(one.max_blocks for one in told),
        blocks_gained=min(one.blocks_gained for one in told),
        page_bytes=sum(one.page_bytes for one in told),
        resident_bytes=sum(resident) if resident else None,
        written_blocks=max(one.written_blocks for one in told),
    )


_MERGES: dict[type, Callable[[Any], Any]] = {
    MoveReport: move_of,
    CommitReport: commit_of,
    HostStatus: status_of,
}
