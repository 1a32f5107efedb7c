"""Instances that may serve a request while a rolling restart replaces weights. Pure functions.

A generation is the set of instances that compute with the same weights. A request stays in one
generation from its first token on: its KV and its tokens are never mixed with those of other
weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from banaserve.base.types import InstanceId, Role

_ROLES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)


@dataclass(frozen=True, slots=True)
class Member:
    """An instance as a member of its generation.

    Attributes:
        weights: Identity of the weights that the instance computes with, or will after its start.
        number: Number of the instance's settings; newer settings have higher numbers.
        takes: True if the instance may receive new requests.
        serves: True if the instance's engine is ready, even if it receives no new requests.
        lives: True if the instance serves, or will be restarted; False if it was given up.
    """

    id: InstanceId
    role: Role
    weights: str
    number: int = 0
    takes: bool = True
    serves: bool = True
    lives: bool = True


def candidates(members: Iterable[Member], bound: str = "") -> frozenset[InstanceId]:
    """Return the instances that may serve a request, all of one generation; empty if it must wait.

    For a new request, a generation that serves both legs is preferred, then the one with more
    instances that accept requests, then the newer one. So all new requests switch to the new
    weights at one moment of a restart. A single instance can do both legs.

    Args:
        bound: Weights that the request began with; empty for a new request. A request with
            ``bound`` may go to an instance that is about to be replaced if no other instance has
            these weights.
    """
    known = list(members)
    if bound:
        own = [one for one in known if one.weights == bound]
        taking = frozenset(one.id for one in own if one.takes)
        return taking or frozenset(one.id for one in own if one.serves)
    groups: dict[str, list[Member]] = {}
    for one in known:
        if one.takes:
            groups.setdefault(one.weights, []).append(one)
    if not groups:
        return frozenset()
    return frozenset(one.id for one in max(groups.values(), key=_rank))


def _rank(group: Sequence[Member]) -> tuple[int, int, int]:
    legs = frozenset[Role]().union(*(one.role.legs for one in group))
    return len(legs), len(group), max(one.number for one in group)


def is_lost(members: Iterable[Member], bound: str) -> bool:
    """Return whether no instance has the weights ``bound`` any more, or will have them again."""
    return not any(one.lives and one.weights == bound for one in members)


def can_leave(leaving: Member, members: Iterable[Member]) -> bool:
    """Return whether another instance could take the streams of ``leaving`` at once."""
    return any(
        one.takes and one.weights == leaving.weights and one.id != leaving.id for one in members
    )


def restart_order(members: Iterable[Member]) -> list[InstanceId]:
    """Return all ids in restart order: roles alternate, so each generation keeps both for long."""
    places: dict[Role, int] = dict.fromkeys(_ROLES, 0)
    keys = []
    for one in sorted(members, key=lambda one: one.id):
        keys.append((places[one.role], _ROLES.index(one.role), one.id))
        places[one.role] += 1
    return [name for _, _, name in sorted(keys)]
