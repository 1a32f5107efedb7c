"""What came out of a simulation. Every result says that its time is simulated."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import Any

from banaserve.errors import UserError
from banaserve.sim.cluster import SimCluster
from banaserve.sim.request import SimRequest

SIMULATED = "simulated: step times come from a cost model, nothing was run"


@dataclass(frozen=True, slots=True)
class Limits:
    """What counts as served well: goodput is the share of requests within both.

    Attributes:
        ttft_s: Time to the first token.
        tpot_s: Mean time between the tokens after it.
    """

    ttft_s: float = 2.0
    tpot_s: float = 0.1

    def __post_init__(self) -> None:
        for name in ("ttft_s", "tpot_s"):
            if not getattr(self, name) > 0:
                raise UserError(f"{name} is {getattr(self, name)}: give more than 0")


def percentile(ordered: Sequence[float], share: float) -> float:
    """Returns the value at ``share`` of an ascending sequence, the nearest rank; 0 of none."""
    if not ordered:
        return 0.0
    # 0.07 * 100 is a little more than 7.
    rank = ceil(share * len(ordered) - 1e-9)
    return ordered[min(len(ordered), max(1, rank)) - 1]


def summary(cluster: SimCluster, num_requests: int, limits: Limits) -> dict[str, Any]:
    """Returns the figures of a run: times in seconds, rates a second, of simulated time."""
    done = cluster.finished
    ttft = sorted(r.first_s - r.arrival_s for r in done)
    tpot = sorted(_tpot_s(r) for r in done if r.output_tokens > 1)
    e2e = sorted(r.end_s - r.arrival_s for r in done)
    total_s = max((r.end_s for r in done), default=0.0)
    good = sum(
        r.first_s - r.arrival_s <= limits.ttft_s and _tpot_s(r) <= limits.tpot_s for r in done
    )
    output_tokens = sum(r.output_tokens for r in done)
    cells = cluster.cells
    engines = [i.engine for cell in cells for i in cell.instances.values()]
    return {
        "time": SIMULATED,
        "num_requests": num_requests,
        "num_finished": len(done),
        "finished_fraction": len(done) / num_requests if num_requests else 0.0,
        "num_refused": sum(cell.num_refused for cell in cells),
        "num_restarted": sum(cell.num_restarted for cell in cells),
        "num_preemptions": sum(engine.num_preemptions for engine in engines),
        "num_moves": sum(len(cell.placing.done) for cell in cells),
        "num_moves_aborted": sum(cell.placing.num_aborted for cell in cells),
        "total_s": total_s,
        "output_tokens_per_s": output_tokens / total_s if total_s else 0.0,
        "requests_per_s": len(done) / total_s if total_s else 0.0,
        "goodput_fraction": good / num_requests if num_requests else 0.0,
        "ttft_mean_s": sum(ttft) / len(ttft) if ttft else 0.0,
        "ttft_p50_s": percentile(ttft, 0.5),
        "ttft_p99_s": percentile(ttft, 0.99),
        "tpot_mean_s": sum(tpot) / len(tpot) if tpot else 0.0,
        "tpot_p50_s": percentile(tpot, 0.5),
        "tpot_p99_s": percentile(tpot, 0.99),
        "e2e_mean_s": sum(e2e) / len(e2e) if e2e else 0.0,
        "e2e_p99_s": percentile(e2e, 0.99),
        "busy_fraction": _mean([engine.busy()[0] / total_s for engine in engines if total_s]),
        "cache_hit_fraction": _hits(cluster),
    }


def _tpot_s(request: SimRequest) -> float:
    if request.output_tokens < 2:
        return 0.0
    return (request.end_s - request.first_s) / (request.output_tokens - 1)


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _hits(cluster: SimCluster) -> float:
    caches = [cache for cell in cluster.cells for cache in cell.caches.values()]
    if cluster.store is not None:
        caches.append(cluster.store)
    asked = sum(cache.asked_tokens for cache in caches)
    return sum(cache.hit_tokens for cache in caches) / asked if asked else 0.0
