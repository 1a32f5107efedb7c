"""Totals of a simulation: plain numbers, so that parts in several processes add up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from banaserve.sim.cluster import SimCluster
from banaserve.sim.timeline import Timeline


class Tally(msgspec.Struct, frozen=True):
    """One run, or several side by side.

    Attributes:
        served: Of each request that ended its arrival, first token, end and output tokens.
        busy_s: Of each engine, in steps.
        steps: Migrations carried out, and when.
    """

    num_requests: int = 0
    num_refused: int = 0
    num_restarted: int = 0
    num_preemptions: int = 0
    num_moves_aborted: int = 0
    num_events: int = 0
    hit_tokens: int = 0
    asked_tokens: int = 0
    served: Sequence[tuple[float, float, float, int]] = ()
    busy_s: Sequence[float] = ()
    steps: Sequence[tuple[float, str]] = ()


_SUMS = tuple(name for name in Tally.__struct_fields__ if name.startswith(("num_", "hit", "asked")))
_LISTS = tuple(name for name in Tally.__struct_fields__ if name not in _SUMS)


def tally(cluster: SimCluster, timeline: Timeline, num_requests: int) -> Tally:
    """Returns what ``cluster`` has come to after ``num_requests``."""
    cells = cluster.cells
    engines = [i.engine for cell in cells for i in cell.instances.values()]
    caches = [cache for cell in cells for cache in cell.caches.values()]
    if cluster.store is not None:
        caches.append(cluster.store)
    return Tally(
        num_requests,
        num_refused=sum(cell.num_refused for cell in cells),
        num_restarted=sum(cell.num_restarted for cell in cells),
        num_preemptions=sum(engine.num_preemptions for engine in engines),
        num_moves_aborted=sum(cell.placing.num_aborted for cell in cells),
        num_events=timeline.num_events,
        hit_tokens=sum(cache.hit_tokens for cache in caches),
        asked_tokens=sum(cache.asked_tokens for cache in caches),
        served=[(r.arrival_s, r.first_s, r.end_s, r.output_tokens) for r in cluster.finished],
        busy_s=[engine.busy()[0] for engine in engines],
        steps=[told for cell in cells for told in cell.placing.told()],
    )


def added_up(parts: Sequence[Tally]) -> Tally:
    """Returns the tally of runs that went side by side."""
    whole: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in _SUMS}
    for name in _LISTS:
        whole[name] = [one for part in parts for one in getattr(part, name)]
    return Tally(**whole)
