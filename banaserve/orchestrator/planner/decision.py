"""Decisions of the elastic policy, and their input; both pass between processes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from banaserve.base.types import (
    InstanceId,
    InstanceView,
    Module,
    ModulePlacement,
    ObservedRequest,
    Role,
)
from banaserve.orchestrator.control.move_policies.interface import Rejected


class PlannedMove(NamedTuple):
    """A module that is to leave ``host`` for ``guest``."""

    host: InstanceId
    guest: InstanceId
    module: Module


class Change(NamedTuple):
    """Planned role and step size of one instance."""

    instance: InstanceId
    role: Role
    step_tokens: int


class LoadMemory(NamedTuple):
    """State that one decision hands to the next.

    Attributes:
        since_s: Time since which the load is the same.
        next_s: Time of the next decision if the load does not change.
        is_settled: True if the load is known.
        wanted: Roles and step sizes of the instances by the last plan.
        num_for_home: Number of consecutive checks by which modules away should come home.
        num_instances: Number of ready instances at the last plan; 0 before it. One that has died
            is waited for; one that comes back after a plan without it needs another plan.
        is_pressed: True once there was a plan because prefill waited for room in the store.
    """

    since_s: float
    next_s: float
    is_settled: bool = False
    wanted: tuple[Change, ...] = ()
    num_for_home: int = 0
    num_instances: int = 0
    is_pressed: bool = False


class Situation(NamedTuple):
    """Input of a decision; it passes between processes unchanged.

    Attributes:
        is_changing: True if steps of an earlier plan are under way.
        num_instances: Number of instances, ready or not; 0 if unknown.
    """

    now_s: float
    instances: Sequence[InstanceView]
    requests: Sequence[ObservedRequest]
    memory: LoadMemory | None
    is_changing: bool = False
    num_instances: int = 0


class Decision(NamedTuple):
    """Changes to make, and the reason why there are no more.

    Attributes:
        changes: Changes of roles and step sizes, in this order.
        candidates: Arrangements that were considered, each with the mean worth of its requests by
            forecast, less the penalty for lost throughput; or, for ``NO_BENEFIT``, the bound of its
            gain by the cost model.
        gain: Predicted increase of the mean worth of a request.
        returns: Modules that come home before ``changes``.
        moves: Modules that leave after ``changes``.
    """

    changes: Sequence[Change]
    candidates: Sequence[Rejected]
    gain: float
    memory: LoadMemory | None
    reason: str
    returns: Sequence[ModulePlacement] = ()
    moves: Sequence[PlannedMove] = ()
