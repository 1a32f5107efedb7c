"""Figures of the simulator for the requests of a comparison."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.sim.cluster.cluster import SimCluster
from banaserve.sim.request import SimRequest
from banaserve.sim.system import System as Simulated
from banaserve.sim.system import preset
from banaserve_bench.compare.result import Workload
from banaserve_bench.compare.systems import ServerSystem
from banaserve_bench.loadgen.client import RequestRecord
from banaserve_bench.serving.cell import CellId, Sent
from banaserve_bench.serving.run import requests_of
from banaserve_bench.serving.summary import Summary, summarize
from banaserve_bench.simulation.run import simulate


def simulated_system(name: str, num_instances: int) -> Simulated | None:
    """Return the simulator's counterpart of a named system; None if there is none.

    The counterpart of ``static-pd`` hands KV over through the store, as that system does on
    engines.
    """
    prefill = num_instances // 2
    apart = {"prefill": prefill, "decode": num_instances - prefill}
    together = {"colocated": num_instances}
    stored = {"handover": "store", "cache": "global"}
    known: dict[str, tuple[str, dict[str, Any]]] = {
        "colocated-round-robin": ("colocated", {**together, "routing": "round_robin"}),
        "colocated-least-requests": ("colocated", {**together, "routing": "least_requests"}),
        "static-pd": ("static", {**apart, **stored, "routing": "round_robin"}),
        "banaserve": ("banaserve", apart),
        "banaserve-no-migration": ("banaserve", {**apart, "migration": "still"}),
    }
    if name not in known:
        return None
    kind, changes = known[name]
    return preset(kind, **changes)


def simulated_cells(
    given: argparse.Namespace, systems: Sequence[ServerSystem], workload: Workload
) -> dict[str, list[Summary]]:
    """Return the simulator's cells of each system that it knows; empty if time is real."""
    if given.profile is None:
        return {}
    found = {}
    for one in systems:
        system = simulated_system(one.name, given.instances)
        if system is not None:
            cells = workload.plan.cells()
            found[one.name] = [_cell(given.profile, system, workload, cell) for cell in cells]
    return found


def _cell(profile: Profile, system: Simulated, workload: Workload, cell: CellId) -> Summary:
    items, arrivals_s = requests_of(workload.plan, cell, workload.dataset)
    assert arrivals_s is not None
    clusters: list[SimCluster] = []
    asked = [
        SimRequest(number, at_s, item.prompt_tokens, item.output_tokens)
        for number, (at_s, item) in enumerate(zip(arrivals_s, items, strict=True))
    ]
    simulate(profile, system, asked, watch=clusters.append)
    ended = {request.id for request in clusters[0].finished}
    warm_up_s = workload.plan.warm_up_s
    sent = [_sent(request, request.id in ended, warm_up_s) for request in asked]
    return summarize(cell, sent, workload.plan.slo, 0.0)


def _sent(request: SimRequest, is_ended: bool, warm_up_s: float) -> Sent:
    """Return the record a client would have; tokens after the first are evenly spaced in time."""
    record = RequestRecord(
        id=f"r{request.id}",
        due_at_s=request.arrival_s,
        sent_at_s=request.arrival_s,
        prompt_tokens=request.prompt_tokens,
    )
    if is_ended:
        gap_s = (request.end_s - request.first_s) / max(1, request.output_tokens - 1)
        record.first_token_at_s, record.ended_at_s = request.first_s, request.end_s
        record.token_at_s = [request.first_s + gap_s * n for n in range(request.output_tokens)]
        record.completion_tokens = request.output_tokens
    else:
        record.error = "did not end in the simulator"
    return Sent(
        is_warm_up=request.arrival_s < warm_up_s,
        source="simulated",
        prompt_tokens=request.prompt_tokens,
        output_tokens=request.output_tokens,
        is_cut=False,
        record=record,
    )
