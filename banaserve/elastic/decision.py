"""Decisions of the elastic policy, and what one is made from; they pass between processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from banaserve.elastic.planning import Change, PlannedMove
from banaserve.types import InstanceView, ModulePlacement, ObservedRequest


class LoadMemory(NamedTuple):
    """What one decision hands to the next.

    Attributes:
        since_s: Since when the load is the same.
        next_s: When to decide again though it is.
        is_settled: It is known.
        wanted: What the instances were to be by the last plan.
        num_for_home: Looks in a row at which modules away would better be at home.
        num_instances: That there were at the last plan; 0 before it.
        is_pressed: There was a plan while prefill waited for room in the store.
    """

    since_s: float
    next_s: float
    is_settled: bool = False
    wanted: tuple[Change, ...] = ()
    num_for_home: int = 0
    num_instances: int = 0
    is_pressed: bool = False


class Situation(NamedTuple):
    """What a decision is made from; it passes between processes as it is.

    Attributes:
        is_changing: Steps of an earlier plan are under way.
        num_instances: That there are, ready or not; 0 where it is not known.
    """

    now_s: float
    instances: Sequence[InstanceView]
    requests: Sequence[ObservedRequest]
    memory: LoadMemory | None
    is_changing: bool = False
    num_instances: int = 0


class Candidate(NamedTuple):
    """An arrangement that was looked at, in words.

    Attributes:
        worth: Mean of its requests by forecast, less what throughput it loses counts for, or, where
            it was not worth one, the bound of what it brings.
        is_forecast: Which of both.
    """

    words: str
    worth: float
    is_forecast: bool = True


class Decision(NamedTuple):
    """What is to change, in this order, and why not more.

    Attributes:
        gain: By how much the worth of a request rises.
        returns: Modules that come home before ``changes``.
        moves: Modules that leave after them.
    """

    changes: Sequence[Change]
    candidates: Sequence[Candidate]
    gain: float
    memory: LoadMemory | None
    reason: str
    returns: Sequence[ModulePlacement] = ()
    moves: Sequence[PlannedMove] = ()
