"""Plan of a scaling: the instances to add and to remove, given the present ones.

Pure functions: equal arguments give equal plans. Instances are counted by role, not by name, since
roles change while a server runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from banaserve.base.errors import MigrationError, UserError
from banaserve.base.types import InstanceId, InstanceView, Role

MAX_INSTANCES = 999
_PREFIXES = {Role.PREFILL: "p", Role.DECODE: "d", Role.COLOCATED: "c"}
_LEGS = (Role.PREFILL, Role.DECODE)


@dataclass(frozen=True, slots=True)
class InstanceCounts:
    """Wanted numbers of instances; None leaves a number unchanged.

    Attributes:
        prefill, decode, colocated: Number of instances with this role.
        total: Number of all instances, on a server whose roles the user does not choose.
    """

    prefill: int | None = None
    decode: int | None = None
    colocated: int | None = None
    total: int | None = None

    def __post_init__(self) -> None:
        numbers = (self.prefill, self.decode, self.colocated, self.total)
        given = [number for number in numbers if number is not None]
        if not given:
            raise UserError(
                "say how many instances there are to be: --pd P:D, --colocated N or --instances N"
            )
        if self.total is not None and len(given) > 1:
            raise UserError("--instances is of all roles: give it alone")
        if min(given) < 0 or max(given) > MAX_INSTANCES:
            raise UserError(f"give 0 to {MAX_INSTANCES} instances of a role")
        if self.total == 0:
            raise UserError("--instances 0: give 1 or more; to end the server, end its process")

    def by_role(self, now: Mapping[Role, int]) -> dict[Role, int]:
        """Return the wanted number of instances by role; ``now`` has the present numbers."""
        roles = (Role.PREFILL, Role.DECODE, Role.COLOCATED)
        given = zip(roles, (self.prefill, self.decode, self.colocated), strict=True)
        return {role: now.get(role, 0) if n is None else n for role, n in given}


@dataclass(frozen=True, slots=True)
class ScalePlan:
    """Instances that a scaling adds and removes.

    Attributes:
        add: New instances: ids not used before in this run, and roles.
        remove: Ids of the instances to remove, in order, once the added ones serve.
    """

    add: tuple[tuple[InstanceId, Role], ...] = ()
    remove: tuple[InstanceId, ...] = ()


def plan_scaling(
    members: Sequence[InstanceView], wanted: InstanceCounts, used_ids: Collection[InstanceId]
) -> ScalePlan:
    """Return the plan from ``members`` to the wanted numbers.

    Instances that accept no requests are removed first, then those with the fewest requests, of
    these the newest.

    Args:
        members: Present instances, the oldest first.
        used_ids: Ids that instances of this run have or had.

    Raises:
        UserError: A leg would be left without instances.
        MigrationError: A leg would be left to instances that do not serve at present.
    """
    if wanted.total is not None:
        add, remove = _to_total(members, wanted.total)
    else:
        add, remove = _to_roles(members, wanted)
    return _checked(members, add, remove, used_ids)


def plan_leaving(
    members: Sequence[InstanceView],
    leaving: Collection[InstanceId],
    used_ids: Collection[InstanceId],
    added: Callable[[Role], Role] | None,
) -> ScalePlan:
    """Return the plan that removes the instances ``leaving``.

    Args:
        members: Present instances, the oldest first.
        used_ids: Ids that instances of this run have or had.
        added: Function from the role of a removed instance to the role of its replacement; None
            adds no replacements.

    Raises:
        MigrationError: A leg would be left without instances, or to instances that do not serve at
            present.
    """
    gone = [member for member in members if member.id in leaving]
    add = [added(member.role) for member in gone] if added is not None else []
    return _checked(members, add, [member.id for member in _leaving_first(gone)], used_ids)


def _checked(
    members: Sequence[InstanceView],
    add: Sequence[Role],
    remove: Sequence[InstanceId],
    used_ids: Collection[InstanceId],
) -> ScalePlan:
    """Return the plan, with ids for the added instances, if each leg is served afterwards."""
    if remove:
        _check_served([member for member in members if member.id not in remove], add)
    return ScalePlan(tuple(_named(add, used_ids)), tuple(remove))


def _to_roles(
    members: Sequence[InstanceView], wanted: InstanceCounts
) -> tuple[list[Role], list[InstanceId]]:
    now = Counter(member.role for member in members)
    numbers = wanted.by_role(now)
    for leg in _LEGS:
        if numbers[leg] + numbers[Role.COLOCATED] < 1:
            raise UserError(
                f"{numbers[Role.PREFILL]}:{numbers[Role.DECODE]} leaves no instance to serve "
                f"{leg.value}: give 1 or more, or --colocated N for instances that do both"
            )
    add, remove = [], []
    for role, number in numbers.items():
        add += [role] * (number - now[role])
        ours = _leaving_first(member for member in members if member.role is role)
        remove += [member.id for member in ours[: max(0, now[role] - number)]]
    return add, remove


def _to_total(members: Sequence[InstanceView], total: int) -> tuple[list[Role], list[InstanceId]]:
    """Return the roles to add and the ids to remove for ``total`` instances.

    Added instances do both legs until their roles are chosen. After removals, each leg still has an
    instance.
    """
    add = [Role.COLOCATED] * (total - len(members))
    stay, remove = list(members), []
    if total == 1:
        doing_both = [one for one in members if one.role is Role.COLOCATED]
        kept = _leaving_first(doing_both or members)[-1]
        stay = [kept]
        remove = [one.id for one in _leaving_first(members) if one is not kept]
    while len(stay) > total:
        order = _leaving_first(stay)
        # Two instances, or one, suffice to serve both legs: of three, one can always leave.
        found = next((one for one in order if _serves_without(stay, one)), order[0])
        stay.remove(found)
        remove.append(found.id)
    if remove and not _serve_both(stay):
        left = " and ".join(f"{one.id} ({one.role.value})" for one in stay)
        raise UserError(
            f"--instances {total} leaves {left}: give one more, or let one do both first with "
            f"`banaserve role {stay[0].id} both`"
        )
    return add, remove


def _serves_without(members: Sequence[InstanceView], leaving: InstanceView) -> bool:
    """Return whether the other instances serve both legs.

    Only those that accept requests count, if there are any.
    """
    stay = [member for member in members if member is not leaving]
    return _serve_both([member for member in stay if member.ready] or stay)


def _serve_both(members: Sequence[InstanceView]) -> bool:
    return {leg for one in members for leg in one.role.legs} >= set(_LEGS)


def _leaving_first(members: Iterable[InstanceView]) -> list[InstanceView]:
    newest_first = reversed(list(members))
    return sorted(newest_first, key=lambda one: (one.ready, one.inflight_requests))


def _check_served(stay: Sequence[InstanceView], add: Sequence[Role]) -> None:
    for leg in _LEGS:
        left = [one for one in stay if leg in one.role.legs]
        is_added = any(leg in role.legs for role in add)
        if not is_added and not left:
            raise MigrationError(f"{leg.value} would be left to nobody")
        if not is_added and not any(one.ready for one in left):
            names = ", ".join(one.id for one in left)
            raise MigrationError(
                f"{leg.value} would be left to {names}, which is drained or does not serve at "
                "present"
            )


def _named(
    roles: Iterable[Role], used_ids: Collection[InstanceId]
) -> Iterable[tuple[InstanceId, Role]]:
    last = Counter[str]()
    for name in used_ids:
        if name[1:].isdecimal():
            last[name[0]] = max(last[name[0]], int(name[1:]) + 1)
    for role in roles:
        prefix = _PREFIXES[role]
        yield InstanceId(f"{prefix}{last[prefix]}"), role
        last[prefix] += 1
