"""Role switches: a whole instance goes over to the other side of prefill and decode."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import NamedTuple

from banaserve.orchestrator.migration.projection import Projected, Projection
from banaserve.orchestrator.model.utilisation import PRESSURE_POWER
from banaserve.types import Influence, InstanceId, Role

_SWITCHES = ((Role.PREFILL, Role.DECODE), (Role.DECODE, Role.PREFILL))


class PowerSums(NamedTuple):
    """Number of loads and the sums of their first to fourth powers.

    With them the pressure after every load has grown by the same amount is known without a look
    at each: switching one of n instances changes the load of all others.
    """

    n: int
    s1: float
    s2: float
    s3: float
    s4: float

    @classmethod
    def of(cls, loads: Iterable[float]) -> PowerSums:
        n, s1, s2, s3, s4 = 0, 0.0, 0.0, 0.0, 0.0
        for load in loads:
            square = load * load
            n, s1, s2 = n + 1, s1 + load, s2 + square
            s3, s4 = s3 + square * load, s4 + square * square
        return cls(n, s1, s2, s3, s4)

    def without(self, load: float) -> PowerSums:
        return PowerSums(
            self.n - 1, self.s1 - load, self.s2 - load**2, self.s3 - load**3, self.s4 - load**4
        )

    def fourth_powers_plus(self, c: float) -> float:
        """The sum of (load + c)^4."""
        return self.s4 + 4 * c * self.s3 + 6 * c**2 * self.s2 + 4 * c**3 * self.s1 + self.n * c**4


def pressure_fall(old: PowerSums, new: PowerSums, load: float) -> float:
    """How much pressure falls when an instance of ``load`` goes from one role to the other.

    Routing spreads what it leaves evenly over the others of its old role, and gives it an even
    share of its new one. One resource; the work of a role is what it was.
    """
    rest = old.without(load)
    ratio = new.n / (new.n + 1)
    after = rest.fourth_powers_plus(load / rest.n)
    after += new.s4 * ratio**PRESSURE_POWER + (new.s1 / (new.n + 1)) ** PRESSURE_POWER
    return (old.s4 + new.s4 - after) / PRESSURE_POWER


class Switch(NamedTuple):
    """A candidate: ``instance`` goes from ``old`` to ``new``."""

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
    """Returns the best candidate of each direction, the one that leaves the least work behind.

    One that may not change is returned only where none may.
    """
    by_role = {
        role: [p for p in projection.values() if p.role is role]
        for role in (Role.PREFILL, Role.DECODE)
    }
    # Written out: properties of thousands of instances take most of the time otherwise.
    compute = {
        role: PowerSums.of([p.compute + p.waiting for p in by_role[role]]) for role in by_role
    }
    memory = {
        role: PowerSums.of([p.wanted_blocks / p.kv_blocks for p in by_role[role]])
        for role in by_role
    }
    found = []
    for old, new in _SWITCHES:
        if len(by_role[old]) <= min_per_role or not by_role[new]:
            continue
        free = [p for p in by_role[old] if not p.away and not p.num_guests and not p.num_moves]
        able = [p for p in free if p.facts.can_switch_role]
        if not able:
            continue
        least = min(able, key=_both_loads)
        if not may_change(least, new):
            willing = [p for p in able if may_change(p, new)]
            least = min(willing or able, key=_both_loads)
        fall = pressure_fall(compute[old], compute[new], least.compute_load)
        fall += pressure_fall(memory[old], memory[new], least.memory_load)
        found.append(Switch(least, old, new, fall))
    return found


def _both_loads(p: Projected) -> tuple[float, str]:
    return (p.compute + p.waiting) + p.wanted_blocks / p.kv_blocks, p.id


def influence(
    projection: Projection, switch: Switch, horizon_s: float
) -> tuple[tuple[InstanceId, Influence], ...]:
    """Returns what every instance of both roles will feel of ``switch``."""
    leaver = switch.instance
    stays = [p for p in projection.values() if p.role is switch.old and p is not leaver]
    joined = [p for p in projection.values() if p.role is switch.new]
    on_each = _part(leaver, 1 / len(stays), horizon_s)
    shares = {p.id: on_each for p in stays}
    total_compute = total_waiting = total_memory = 0.0
    falls = len(joined) / (len(joined) + 1) - 1
    for p in joined:
        compute, waiting, memory = p.compute, p.waiting, p.wanted_blocks / p.kv_blocks
        total_compute, total_waiting = total_compute + compute, total_waiting + waiting
        total_memory += memory
        shares[p.id] = Influence(
            compute=compute * falls, waiting_s=waiting * falls * horizon_s, memory=memory * falls
        )
    members = len(joined) + 1
    shares[leaver.id] = Influence(
        compute=total_compute / members - leaver.compute,
        waiting_s=(total_waiting / members - leaver.waiting) * horizon_s,
        memory=total_memory / members - leaver.memory_load,
    )
    return tuple(sorted(shares.items()))


def _part(source: Projected, factor: float, horizon_s: float) -> Influence:
    """``factor`` of what ``source`` does, as an influence."""
    return Influence(
        compute=source.compute * factor,
        waiting_s=source.waiting * factor * horizon_s,
        memory=source.wanted_blocks / source.kv_blocks * factor,
    )
