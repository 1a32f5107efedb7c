"""Simulation of a large cluster by several processes, each with a part of the cells."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterable, Iterator
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.sim.cluster.cluster import ClusterPart, cells_of
from banaserve.sim.request import SimRequest
from banaserve.sim.result import LatencyLimits, Tally, added_up
from banaserve.sim.system import System
from banaserve_bench.simulation.run import tallied, told

Load = Callable[[], Iterable[SimRequest]]


def simulate_in_parts(
    profile: Profile,
    system: System,
    load: Load,
    processes: int,
    limits: LatencyLimits | None = None,
) -> dict[str, Any]:
    """Return the result of ``simulate``, with the cells distributed over several ``processes``.

    Cells know nothing of each other but their loads, by which a request finds its cell. Here
    requests are distributed over the parts, equally many for each cell, and within its part each
    goes to the cell with the fewest requests. So another number of processes gives another, equally
    valid, run; equal arguments give equal results, and one process gives those of ``simulate``.

    Args:
        load: Function that returns all requests; called in each process.

    Raises:
        UserError: There are fewer cells than processes, or a store that all cells share.
        RuntimeError: A process has ended without a result.
    """
    num_cells = len(cells_of(system))
    if not 1 <= processes <= num_cells:
        raise UserError(f"{processes} processes for {num_cells} cells: give 1 to {num_cells}")
    if processes == 1:
        return told(tallied(profile, system, load()), profile, system, limits)
    if system.cache == "global":
        raise UserError("a store that all cells share is simulated by one process")
    context = multiprocessing.get_context("fork")
    running = []
    for place in range(processes):
        part = ClusterPart(place, processes)
        ours, theirs = context.Pipe(duplex=False)
        process = context.Process(
            target=_simulate, args=(theirs, profile, system, load, part, num_cells), daemon=True
        )
        process.start()
        theirs.close()
        running.append((process, ours))
    found = [_received(ours) for _, ours in running]
    for process, _ in running:
        process.join()
    return told(added_up(found), profile, system, limits)


def dealt(
    requests: Iterable[SimRequest], part: ClusterPart, num_cells: int
) -> Iterator[SimRequest]:
    """Yield the requests of ``part``: the cells of the cluster take turns."""
    for number, request in enumerate(requests):
        if number % num_cells % part.of == part.place:
            yield request


def _simulate(
    answer: Connection,
    profile: Profile,
    system: System,
    load: Load,
    part: ClusterPart,
    num_cells: int,
) -> None:
    found = tallied(profile, system, dealt(load(), part, num_cells), part=part)
    answer.send_bytes(msgspec.msgpack.encode(found))
    answer.close()


def _received(answer: Connection) -> Tally:
    try:
        return msgspec.msgpack.decode(answer.recv_bytes(), type=Tally)
    except EOFError as error:
        raise RuntimeError("a process of the simulation ended without a result") from error
