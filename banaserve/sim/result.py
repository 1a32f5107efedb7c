"""Totals of a simulation, and the result made of them, which states that its time is simulated.

Totals are plain numbers, so that the totals of parts in several processes add up.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

import msgspec

from banaserve.base.errors import UserError
from banaserve.sim.cluster.cluster import SimCluster
from banaserve.sim.timeline import Timeline


class Tally(msgspec.Struct, frozen=True):
    """Totals of one run, or of several side by side.

    Attributes:
        served: Arrival, first token, end and output tokens of each request that has ended.
        busy_s: Time that each engine has spent in steps, in seconds.
        steps: Migrations carried out, each after its time in seconds.
    """

    num_requests: int = 0
    num_refused: int = 0
    num_restarted: int = 0
    num_rebalanced: int = 0
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
    """Return the totals of ``cluster`` after ``num_requests``."""
    cells = cluster.cells
    engines = [i.engine for cell in cells for i in cell.instances.values()]
    caches = [cache for cell in cells for cache in cell.caches.values()]
    if cluster.store is not None:
        caches.append(cluster.store)
    return Tally(
        num_requests,
        num_refused=sum(cell.num_refused for cell in cells),
        num_restarted=sum(cell.num_restarted for cell in cells),
        num_rebalanced=sum(cell.num_rebalanced for cell in cells),
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
    """Return the tally of runs side by side."""
    whole: dict[str, Any] = {name: sum(getattr(part, name) for part in parts) for name in _SUMS}
    for name in _LISTS:
        whole[name] = [one for part in parts for one in getattr(part, name)]
    return Tally(**whole)


SIMULATED = "simulated: step times come from a cost model, nothing was run"


@dataclass(frozen=True, slots=True)
class LatencyLimits:
    """Limits of good service: goodput is the share of requests within both.

    Attributes:
        ttft_s: Maximum time to the first token, in seconds.
        tpot_s: Maximum mean time between the tokens after it, in seconds.
    """

    ttft_s: float = 2.0
    tpot_s: float = 0.1

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}: give more than 0")


def percentile(ordered: Sequence[float], share: float) -> float:
    """Return the value at ``share`` of an ascending sequence, by nearest rank; 0 if it is empty."""
    if not ordered:
        return 0.0
    # 1e-9 absorbs rounding errors: 0.07 * 100 is a little more than 7.
    rank = ceil(share * len(ordered) - 1e-9)
    return ordered[min(len(ordered), max(1, rank)) - 1]


def summary(tally: Tally, limits: LatencyLimits) -> dict[str, Any]:
    """Return the figures of a run: times in simulated seconds, rates per simulated second."""
    served, num_requests = tally.served, tally.num_requests
    each = [(first - at, _tpot_s(first, end, tokens)) for at, first, end, tokens in served]
    ttft = sorted(ttft_s for ttft_s, _ in each)
    tpot = sorted(each[n][1] for n, one in enumerate(served) if one[3] > 1)
    e2e = sorted(end - at for at, _, end, _ in served)
    total_s = max((end for _, _, end, _ in served), default=0.0)
    good = sum(ttft_s <= limits.ttft_s and tpot_s <= limits.tpot_s for ttft_s, tpot_s in each)
    output_tokens = sum(tokens for *_, tokens in served)
    asked = tally.asked_tokens
    return {
        "time": SIMULATED,
        "num_requests": num_requests,
        "num_finished": len(served),
        "finished_fraction": len(served) / num_requests if num_requests else 0.0,
        "num_refused": tally.num_refused,
        "num_restarted": tally.num_restarted,
        "num_rebalanced": tally.num_rebalanced,
        "num_preemptions": tally.num_preemptions,
        "num_moves": len(tally.steps),
        "num_moves_aborted": tally.num_moves_aborted,
        "total_s": total_s,
        "output_tokens_per_s": output_tokens / total_s if total_s else 0.0,
        "requests_per_s": len(served) / total_s if total_s else 0.0,
        "goodput_fraction": good / num_requests if num_requests else 0.0,
        "ttft_mean_s": _mean(ttft),
        "ttft_p50_s": percentile(ttft, 0.5),
        "ttft_p99_s": percentile(ttft, 0.99),
        "tpot_mean_s": _mean(tpot),
        "tpot_p50_s": percentile(tpot, 0.5),
        "tpot_p99_s": percentile(tpot, 0.99),
        "e2e_mean_s": _mean(e2e),
        "e2e_p99_s": percentile(e2e, 0.99),
        "busy_fraction": _mean([busy_s / total_s for busy_s in tally.busy_s if total_s]),
        "cache_hit_fraction": tally.hit_tokens / asked if asked else 0.0,
    }


def _tpot_s(first_s: float, end_s: float, output_tokens: int) -> float:
    return (end_s - first_s) / (output_tokens - 1) if output_tokens > 1 else 0.0


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
