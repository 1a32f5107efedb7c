"""What happens to a cluster in a case, apart from its load."""

from __future__ import annotations

from dataclasses import dataclass

from banaserve.errors import UserError
from banaserve.names import check_known
from banaserve.sim.cluster import SimCluster
from banaserve.sim.timeline import Timeline
from banaserve.types import InstanceId

KINDS = ("kill", "kill_guest_in_move", "kill_host_in_move", "slow")

_LOOK_S = 0.02
"""How often a case looks whether a move is under way; moves take longer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Something that happens to one instance, in every system that has it.

    Attributes:
        kind: ``slow`` multiplies its step times by ``factor`` (1 ends it); ``kill`` ends it;
            ``kill_host_in_move`` and ``kill_guest_in_move`` end a side of the first move that is
            under way after ``at_s``.
        back_after_s: Seconds until a killed instance serves again; None is never.
    """

    at_s: float
    kind: str
    instance: str | None = None
    factor: float = 1.0
    back_after_s: float | None = None

    def __post_init__(self) -> None:
        check_known("kind of event", self.kind, KINDS)
        if self.at_s < 0:
            raise UserError(f"at_s is {self.at_s}: give 0 or more")
        if not 0.01 <= self.factor <= 100:
            raise UserError(f"factor is {self.factor}: give a number in [0.01, 100]")
        if (self.instance is None) == (self.kind in ("kill", "slow")):
            raise UserError(f"a {self.kind} event names {'no' if self.instance else 'an'} instance")


def arrange(event: Event, cluster: SimCluster, timeline: Timeline) -> None:
    """Put ``event`` on the timeline, unless its instance is of another system."""
    everyone = {name for cell in cluster.cells for name in cell.instances}
    if event.instance is None:
        timeline.at(event.at_s, lambda _: _kill_in_move(event, cluster, timeline))
    elif event.instance in everyone:
        timeline.at(event.at_s, lambda _: _happen(event, cluster))


def _happen(event: Event, cluster: SimCluster) -> None:
    assert event.instance is not None
    cell, instance = cluster.find(event.instance)
    if event.kind == "slow":
        instance.engine.costs.slowdown = event.factor
    else:
        cell.kill(instance.id, event.back_after_s)


def _kill_in_move(event: Event, cluster: SimCluster, timeline: Timeline) -> None:
    for cell in cluster.cells:
        for step in cell.placing.under_way:
            host, guest = step.instances
            victim: InstanceId = host if event.kind == "kill_host_in_move" else guest
            cell.kill(victim, event.back_after_s)
            return
    if any(cell.load and not cell.is_lost for cell in cluster.cells):
        timeline.after(_LOOK_S, lambda _: _kill_in_move(event, cluster, timeline))
