"""Events of a case besides its load: instances that die or slow down."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.base.types import Step
from banaserve.sim.cluster.cell import Cell
from banaserve.sim.cluster.cluster import SimCluster
from banaserve.sim.timeline import Timeline

KINDS = ("kill", "kill_guest_in_move", "kill_host_in_move", "slow")

_INTO_MOVE_S = 0.02
"""Time into a new move at which one of its sides dies, in seconds; at most half of the move."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Event:
    """Event of one instance, in every system that has this instance.

    Attributes:
        kind: Kind of the event: ``slow`` multiplies the instance's step times by ``factor`` (1 ends
            the slowdown); ``kill`` kills the instance; ``kill_host_in_move`` and
            ``kill_guest_in_move`` kill a side of the first move that is under way after ``at_s``.
        back_after_s: Time until a killed instance serves again, in seconds; None for never.
    """

    at_s: float
    kind: str
    instance: str | None = None
    factor: float = 1.0
    back_after_s: float | None = None

    def __post_init__(self) -> None:
        check_known("kind of event", self.kind, KINDS)
        for name in ("at_s", "back_after_s"):
            value = getattr(self, name)
            if value is not None and not 0 <= value < math.inf:
                raise UserError(f"{name} is {value}: give 0 or more")
        if not 0.01 <= self.factor <= 100:
            raise UserError(f"factor is {self.factor}: give a number in [0.01, 100]")
        if (self.instance is None) == (self.kind in ("kill", "slow")):
            raise UserError(f"a {self.kind} event names {'no' if self.instance else 'an'} instance")


def arrange(event: Event, cluster: SimCluster, timeline: Timeline) -> None:
    """Put ``event`` on the timeline, unless the cluster lacks its instance."""
    everyone = {name for cell in cluster.cells for name in cell.instances}
    if event.instance is None:
        timeline.at(event.at_s, _DeathInMove(event, cluster, timeline).begin)
    elif event.instance in everyone:
        timeline.at(event.at_s, lambda _: _happen(event, cluster))


def _happen(event: Event, cluster: SimCluster) -> None:
    assert event.instance is not None
    cell, instance = cluster.find(event.instance)
    if event.kind == "slow":
        instance.engine.costs.slowdown = event.factor
    else:
        cell.kill(instance.id, event.back_after_s)


class _DeathInMove:
    """Death of a side of a move; it waits without an event, which would keep a simulation going."""

    def __init__(self, event: Event, cluster: SimCluster, timeline: Timeline) -> None:
        self._event, self._cluster, self._timeline = event, cluster, timeline
        self._is_done = False

    def begin(self, _: object) -> None:
        """Kill a side of a move that is under way, or else of the next move that begins."""
        for cell in self._cluster.cells:
            for step in cell.placing.under_way:
                self._strike((cell, step))
                return
        for cell in self._cluster.cells:
            cell.placing.on_begin.append(partial(self._begun, cell))

    def _begun(self, cell: Cell, step: Step) -> None:
        if not self._is_done:
            self._timeline.after(min(_INTO_MOVE_S, step.cost_s / 2), self._strike, (cell, step))

    def _strike(self, found: tuple[Cell, Step]) -> None:
        cell, step = found
        if self._is_done or step not in cell.placing.under_way:
            return
        self._is_done = True
        host, guest = step.instances
        victim = host if self._event.kind == "kill_host_in_move" else guest
        cell.kill(victim, self._event.back_after_s)
