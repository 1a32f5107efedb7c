"""Instances that may serve a request while a rolling restart replaces weights.

A generation is the set of instances that compute with the same weights. A request stays in one
generation from its first token on: its KV and its tokens are never mixed with those of other
weights.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence

from banaserve.base.types import InstanceId, Role
from banaserve.serving.instances.instance import Instance, State

_ROLES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)


def candidates(instances: Iterable[Instance], bound: str = "") -> frozenset[InstanceId]:
    """Return the instances that may serve a request, all of one generation; empty if it must wait.

    For a new request, a generation that serves both legs is preferred, then the one with more
    instances that accept requests, then the newer one. So all new requests switch to the new
    weights at one moment of a restart. A single instance can do both legs.

    Args:
        bound: Weights that the request began with; empty for a new request. A request with
            ``bound`` may go to an instance that is about to be replaced if no other instance has
            these weights.
    """
    if bound:
        own = [one for one in instances if one.weights == bound]
        taking = frozenset(one.id for one in own if one.takes_requests)
        return taking or frozenset(one.id for one in own if one.is_ready)
    groups: dict[str, list[Instance]] = {}
    for one in instances:
        if one.takes_requests:
            groups.setdefault(one.weights, []).append(one)
    if not groups:
        return frozenset()
    return frozenset(one.id for one in max(groups.values(), key=_rank))


def _rank(group: Sequence[Instance]) -> tuple[int, int, int]:
    legs = frozenset[Role]().union(*(one.role.legs for one in group))
    return len(legs), len(group), max(one.settings.number for one in group)


def is_lost(instances: Collection[Instance], bound: str) -> bool:
    """Return whether other weights have replaced ``bound``, which no instance will have again.

    Instances of one generation that have all been given up are no loss of weights: the restart that
    is under way may start one of them again.
    """
    may_serve = any(one.state is not State.FAILED and one.weights == bound for one in instances)
    return not may_serve and any(one.weights != bound for one in instances)


def can_leave(leaving: Instance, instances: Iterable[Instance]) -> bool:
    """Return whether another instance could take the streams of ``leaving`` at once."""
    others = (one for one in instances if one.id != leaving.id)
    return any(one.takes_requests and one.weights == leaving.weights for one in others)


def restart_order(instances: Iterable[Instance]) -> list[InstanceId]:
    """Return all ids in restart order: roles alternate, so each generation keeps both for long."""
    places: dict[Role, int] = dict.fromkeys(_ROLES, 0)
    keys = []
    for one in sorted(instances, key=lambda one: one.id):
        keys.append((places[one.role], _ROLES.index(one.role), one.id))
        places[one.role] += 1
    return [name for _, _, name in sorted(keys)]
