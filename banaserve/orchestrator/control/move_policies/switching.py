"""Role switches: a whole instance changes from prefill to decode, or from decode to prefill."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import inf
from typing import NamedTuple

from banaserve.base.types import Influence, InstanceId, Role
from banaserve.orchestrator.control.model.utilisation import PRESSURE_POWER
from banaserve.orchestrator.control.projection.projection import Projected, Projection


class PowerSums(NamedTuple):
    """Number of loads and the sums of their first to fourth powers.

    They give the pressure after all loads have grown by the same amount without a loop over the
    loads: switching one of n instances changes the load of all others.
    """

    n: int
    s1: float
    s2: float
    s3: float
    s4: float

    @classmethod
    def of(cls, loads: Sequence[float]) -> PowerSums:
        s1 = s2 = s3 = s4 = 0.0
        for load in loads:
            square = load * load
            s1 += load
            s2 += square
            s3 += square * load
            s4 += square * square
        return cls(len(loads), s1, s2, s3, s4)

    def without(self, load: float) -> PowerSums:
        return PowerSums(
            self.n - 1, self.s1 - load, self.s2 - load**2, self.s3 - load**3, self.s4 - load**4
        )

    def fourth_powers_plus(self, c: float) -> float:
        """Return the sum of (load + c)^4."""
        return self.s4 + 4 * c * self.s3 + 6 * c**2 * self.s2 + 4 * c**3 * self.s1 + self.n * c**4


def pressure_fall(old: PowerSums, new: PowerSums, load: float) -> float:
    """Return by how much the pressure of one resource falls if an instance changes its role.

    Routing spreads its work evenly over the other instances of its old role, and gives it an equal
    share of the work of its new role. The total work of a role does not change.

    Args:
        old: Power sums of the loads of its old role.
        new: Power sums of the loads of its new role.
        load: Load of the instance.
    """
    rest = old.without(load)
    ratio = new.n / (new.n + 1)
    after = rest.fourth_powers_plus(load / rest.n)
    after += new.s4 * ratio**PRESSURE_POWER + (new.s1 / (new.n + 1)) ** PRESSURE_POWER
    return (old.s4 + new.s4 - after) / PRESSURE_POWER


class Switch(NamedTuple):
    """A candidate: ``instance`` changes from ``old`` to ``new``; pressure falls by ``fall``."""

    instance: Projected
    old: Role
    new: Role
    fall: float

    @property
    def words(self) -> str:
        return f"{self.instance.id} from {self.old.value} to {self.new.value}"


def switches(
    projection: Projection, min_per_role: int, may_change: Callable[[Projected, Role], bool]
) -> list[Switch]:
    """Return the best candidate of each direction: the instance with the least work.

    An instance that may not change is returned only if none may.
    """
    sides = [_Side.of(projection, role) for role in (Role.PREFILL, Role.DECODE)]
    found = []
    for old, new in (sides, sides[::-1]):
        if len(old.members) <= min_per_role or not new.members:
            continue
        least = old.least_loaded()
        if least is None:
            continue
        if not may_change(least, new.role):
            least = old.least_loaded(_into(new.role, may_change)) or least
        fall = pressure_fall(old.compute, new.compute, least.compute_load)
        fall += pressure_fall(old.memory, new.memory, least.memory_load)
        found.append(Switch(least, old.role, new.role, fall))
    return found


def _into(role: Role, may_change: Callable[[Projected, Role], bool]) -> Callable[[Projected], bool]:
    return lambda instance: may_change(instance, role)


class _Side(NamedTuple):
    """Instances of one role and their loads, in the order of the projection."""

    role: Role
    members: list[Projected]
    computes: list[float]
    memories: list[float]
    compute: PowerSums
    memory: PowerSums

    @classmethod
    def of(cls, projection: Projection, role: Role) -> _Side:
        members = [p for p in projection.values() if p.role is role]
        # Written out for speed: properties of thousands of instances would take most of the time.
        computes = [p.compute + p.waiting for p in members]
        memories = [p.wanted_blocks / p.kv_blocks for p in members]
        sums = PowerSums.of(computes), PowerSums.of(memories)
        return cls(role, members, computes, memories, *sums)

    def least_loaded(self, may: Callable[[Projected], bool] | None = None) -> Projected | None:
        """Return the free instance with the least work, the first by name among equals, or None."""
        least, least_load = None, inf
        for p, compute, memory in zip(self.members, self.computes, self.memories, strict=True):
            load = compute + memory
            # Not min() with tuples: thousands of tuples would start the garbage collector.
            if load > least_load or (load == least_load and least is not None and p.id > least.id):
                continue
            is_free = not p.away and not p.num_guests and not p.num_moves
            if is_free and p.facts.can_switch_role and (may is None or may(p)):
                least, least_load = p, load
        return least


def influence(
    projection: Projection, switch: Switch, horizon_s: float
) -> tuple[tuple[InstanceId, Influence], ...]:
    """Return the influence of ``switch`` on every instance of both roles."""
    leaver = switch.instance
    old, new = switch.old, switch.new
    stays = [p.id for p in projection.values() if p.role is old and p is not leaver]
    joined = [p for p in projection.values() if p.role is new]
    shares = dict.fromkeys(stays, _part(leaver, 1 / len(stays), horizon_s))
    total_compute = total_waiting = total_memory = 0.0
    falls = len(joined) / (len(joined) + 1) - 1
    for p in joined:
        compute, waiting, memory = p.compute, p.waiting, p.wanted_blocks / p.kv_blocks
        total_compute += compute
        total_waiting += waiting
        total_memory += memory
        shares[p.id] = Influence(
            compute * falls, 0, 0, 0.0, waiting * falls * horizon_s, memory * falls
        )
    members = len(joined) + 1
    shares[leaver.id] = Influence(
        compute=total_compute / members - leaver.compute,
        waiting_s=(total_waiting / members - leaver.waiting) * horizon_s,
        memory=total_memory / members - leaver.memory_load,
    )
    return tuple(sorted(shares.items()))


def _part(source: Projected, factor: float, horizon_s: float) -> Influence:
    """Return the share ``factor`` of the work of ``source``, as an influence."""
    return Influence(
        compute=source.compute * factor,
        waiting_s=source.waiting * factor * horizon_s,
        memory=source.wanted_blocks / source.kv_blocks * factor,
    )
