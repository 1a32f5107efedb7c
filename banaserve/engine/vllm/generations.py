"""Instances that may serve a request while a rolling restart replaces weights. Pure.

A generation is all instances that compute with the same weights. A request stays in one from its
first token on: neither its KV nor its tokens mix with those of other weights.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from banaserve.types import InstanceId, Role

_ROLES = (Role.PREFILL, Role.DECODE, Role.COLOCATED)


@dataclass(frozen=True, slots=True)
class Member:
    """An instance as a member of its generation.

    Attributes:
        weights: That it computes with, or will when it has started.
        number: Of its settings; later ones are higher.
        takes: It may be sent new requests.
        serves: Its engine answers; where it does not take, it is about to be replaced.
        lives: It serves, or will serve again by itself.
    """

    id: InstanceId
    role: Role
    weights: str
    number: int = 0
    takes: bool = True
    serves: bool = True
    lives: bool = True


def candidates(members: Iterable[Member], bound: str = "") -> frozenset[InstanceId]:
    """Instances among which a request is routed, all of one generation; none where it has to wait.

    A new request goes to the generation that serves both legs, then to that with more instances
    that take requests, then to the newer one: so there is one moment in a restart at which all new
    requests begin to go to the new weights. One instance alone does both legs.

    Args:
        bound: Weights that the request has begun with; empty where it has not. It may then go to
            an instance that is about to be replaced, where no other has its weights.
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
    """Whether no instance computes with the weights ``bound`` any more, or will again."""
    return not any(one.lives and one.weights == bound for one in members)


def can_leave(leaving: Member, members: Iterable[Member]) -> bool:
    """Whether others could take the streams of ``leaving`` at once."""
    return any(
        one.takes and one.weights == leaving.weights and one.id != leaving.id for one in members
    )


def restart_order(members: Iterable[Member]) -> list[InstanceId]:
    """One after the other, the roles in turn: each generation has both as long as it can."""
    places: dict[Role, int] = dict.fromkeys(_ROLES, 0)
    keys = []
    for one in sorted(members, key=lambda one: one.id):
        keys.append((places[one.role], _ROLES.index(one.role), one.id))
        places[one.role] += 1
    return [name for _, _, name in sorted(keys)]
