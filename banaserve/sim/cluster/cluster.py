"""Simulated cluster: one or many cells on one timeline."""

from __future__ import annotations

import gc
import heapq
from collections.abc import Callable, Iterable, Iterator
from typing import NamedTuple

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.base.types import InstanceId, Role
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.orchestrator.control.rebalancing import RebalanceOptions
from banaserve.sim.cluster.cell import Cell
from banaserve.sim.instances.instance import SimInstance
from banaserve.sim.instances.prefix_cache import SimPrefixCache
from banaserve.sim.request import SimRequest
from banaserve.sim.system import System
from banaserve.sim.timeline import Timeline

_GIVE_UP_S = 60.0
"""Time without any event after which a cluster is left with its requests unfinished, in seconds."""


class ClusterPart(NamedTuple):
    """Part of a cluster: every ``of``-th cell, from the cell at ``place`` on."""

    place: int
    of: int


WHOLE = ClusterPart(0, 1)


class SimCluster:
    """Cells side by side; a request goes to the cell with the fewest requests for its size."""

    def __init__(
        self, timeline: Timeline, profile: Profile, system: System, part: ClusterPart = WHOLE
    ) -> None:
        self._timeline = timeline
        self._system = system
        self._is_running = True
        self._stuck_s = 0.0
        self._num_ticks = 0
        tpot_s = float(system.routing_options.get("tpot_s", 0.0))
        self._rebalance_options = RebalanceOptions(tpot_s=tpot_s)
        self.store = SimPrefixCache(system.store_tokens) if system.cache == "global" else None
        for name in system.devices:
            check_known("instance with a device of its own", name, [n for n, _ in system.roles()])
        groups = cells_of(system)[part.place :: part.of]
        self._least_first: list[tuple[float, int]] = []
        self._lighter: set[int] = set()
        self.cells = [
            Cell(timeline, profile, system, group, self.store, turn, self._lighter.add)
            for turn, group in enumerate(groups)
        ]
        self._lighter.update(range(len(self.cells)))
        if system.migration != "still":
            self._tick_after(system.control_s, self._control)
        if system.rebalances:
            self._tick_after(self._rebalance_options.interval_s, self._rebalance)

    def run(self, requests: Iterable[SimRequest]) -> None:
        """Let ``requests`` arrive, in the order of their arrivals, and run until all have ended."""
        self._arrivals: Iterator[SimRequest] = iter(requests)
        self._next_arrival(None)
        # Millions of requests live until the end; a collector would scan them again and again.
        was_collecting = gc.isenabled()
        gc.disable()
        try:
            self._timeline.run()
        finally:
            if was_collecting:
                gc.enable()

    def _next_arrival(self, request: SimRequest | None) -> None:
        """Put only the next arrival on the timeline, so that the timeline stays short."""
        if request is not None:
            self.cells[self._least()].submit(request)
        upcoming = next(self._arrivals, None)
        if upcoming is None:
            self._is_running = False
        else:
            self._timeline.at(upcoming.arrival_s, self._next_arrival, upcoming)

    def _least(self) -> int:
        """Return the place of the cell with the fewest requests for its size, the first of equals.

        An entry of the heap may be too low, since requests have arrived; it is corrected when it
        reaches the top. It is never too high: where requests have ended, a lower entry is added.
        """
        cells, heap = self.cells, self._least_first
        if len(cells) == 1:
            return 0
        if len(heap) > 8 * len(cells):
            heap.clear()
            self._lighter.update(range(len(cells)))
        for place in self._lighter:
            heapq.heappush(heap, (_load(cells[place]), place))
        self._lighter.clear()
        while True:
            load, place = heap[0]
            now = _load(cells[place])
            if load == now:
                return place
            heapq.heapreplace(heap, (now, place))

    def _control(self, _: None) -> None:
        self._num_ticks -= 1
        for cell in self.cells:
            cell.control()
        # If nothing else is due, waiting requests fit nowhere; only another placement could help.
        is_stuck = self._timeline.num_due == self._num_ticks
        self._stuck_s = self._stuck_s + self._system.control_s if is_stuck else 0.0
        if self._is_needed and self._stuck_s < _GIVE_UP_S:
            self._tick_after(self._system.control_s, self._control)

    def _rebalance(self, _: None) -> None:
        self._num_ticks -= 1
        for cell in self.cells:
            cell.rebalance(self._rebalance_options)
        # If nothing is due but turns of control, there is no stream that could move.
        if self._is_needed and self._timeline.num_due > self._num_ticks:
            self._tick_after(self._rebalance_options.interval_s, self._rebalance)

    @property
    def _is_needed(self) -> bool:
        return self._is_running or any(cell.load for cell in self.cells)

    def _tick_after(self, delay_s: float, tick: Callable[[None], None]) -> None:
        self._num_ticks += 1
        self._timeline.after(delay_s, tick)

    def find(self, name: str) -> tuple[Cell, SimInstance]:
        """Return an instance and its cell.

        Raises:
            UserError: There is no instance of that name; the message names the nearest.
        """
        everyone = [str(known) for cell in self.cells for known in cell.instances]
        check_known("instance", name, everyone)
        cell = next(cell for cell in self.cells if name in cell.instances)
        return cell, cell.instances[InstanceId(name)]

    @property
    def finished(self) -> list[SimRequest]:
        """Return the requests that have ended, cell by cell."""
        return [request for cell in self.cells for request in cell.finished]


def _load(cell: Cell) -> float:
    return cell.load / len(cell.instances)


def cells_of(system: System) -> list[list[tuple[str, Role]]]:
    """Split the instances into cells in which every role of the system occurs.

    Raises:
        UserError: A cell would lack a role.
    """
    everyone = system.roles()
    size = system.cell_size or len(everyone)
    groups = [everyone[first : first + size] for first in range(0, len(everyone), size)]
    needed = {role for _, role in everyone}
    for group in groups:
        if {role for _, role in group} != needed:
            raise UserError(
                f"a cell of {len(group)} instances would lack a role: choose another cell_size"
            )
    return groups
