"""Time and memory of each decision of the control plane, by the number of instances or cells."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from dataclasses import replace
from random import Random
from typing import Any

from banaserve.base.types import ClusterView, RequestId, RequestView
from banaserve.orchestrator.control import turn as control
from banaserve.orchestrator.control.costs.profile import load as load_profile
from banaserve.orchestrator.control.move_policies import registry as migrations
from banaserve.orchestrator.control.routing import registry as routings
from banaserve_bench.results.statistics import median
from banaserve_route.policies.fleet import Fleet
from banaserve_route.policies.interface import PeerView, ReplicaId, ReplicaView, Request
from banaserve_route.policies.registry import make
from banaserve_route.sim.replica import BLOCK_TOKENS, UNIT_BYTES
from benchmarks.orchestrator import RANDOM, cluster

INSTANCES = (8, 32, 128, 512)
"""Numbers of instances of one cell."""
CELLS = (8, 64, 256, 1024)
"""Numbers of cells of one region."""

_PROFILE = "opt-13b-a100"
_PEERS = 4
_PREFIX_UNITS = 32
_NUM_SENT = 1000
_REPEATS = 15
_LOOP_S = 0.01


def router_us(num_instances: int, seed: int) -> float:
    """Return the CPU time of one choice of ``load_aware`` over a cell, in microseconds."""
    view = _view(num_instances, seed)
    policy = routings.make_named("load_aware")
    request = RequestView(RequestId("1"), 250, 0, 0)
    return 1e6 * _taken_s(lambda: policy.route(request, view))


def controller_ms(num_instances: int, seed: int) -> float:
    """Return the CPU time of one turn of a cell's controller with random loads, in milliseconds."""
    view = _view(num_instances, seed)
    policy = migrations.make_named("repaired")
    limits, before = control.ControlLimits(), control.Remembered()
    before = control.turn(view, policy, control.Mode.ON, False, limits, before).after
    later = replace(view, now_s=view.now_s + 1.0)
    mode = control.Mode.ON
    return 1e3 * _taken_s(lambda: control.turn(later, policy, mode, False, limits, before))


def balancer_us(num_cells: int, seed: int) -> float:
    """Return the CPU time of a balancer's choice over its cells and four peers, in microseconds."""
    fleet = _fleet(num_cells, seed)
    # A prompt that shares nothing with earlier ones, so that every cell is considered.
    request = _request(_NUM_SENT + seed)
    return 1e6 * _taken_s(lambda: fleet.choose(request, 100.0))


def kib_of_instance(num_instances: int, seed: int) -> float:
    """Return what a cell's router and controller keep of an instance (view, report), in KiB."""

    def keep() -> object:
        view = _view(num_instances, seed)
        policy, limits = migrations.make_named("still"), control.ControlLimits()
        mode = control.Mode.ON
        return control.turn(view, policy, mode, False, limits, control.Remembered())

    return _kept_bytes(keep) / num_instances / 1024


def kib_of_cell(num_cells: int, seed: int) -> float:
    """Return what a balancer keeps of a cell, without the prefixes sent there, in KiB."""
    return _kept_bytes(lambda: _fleet(num_cells, seed)) / num_cells / 1024


def _view(num_instances: int, seed: int) -> ClusterView:
    return cluster(num_instances, seed, RANDOM, load_profile(_PROFILE).facts)


def _fleet(num_cells: int, seed: int) -> Fleet:
    options: dict[str, Any] = {
        "push": "outstanding",
        "max_outstanding": 512,
        "peer_snapshots": False,
    }
    policy = make("skywalker", Random(seed), unit_bytes=UNIT_BYTES, **options)
    fleet, draws = Fleet(policy, "europe"), Random(f"{seed} {num_cells}")
    for number in range(num_cells):
        view = ReplicaView(ReplicaId(f"cell-{number:05}"), "europe")
        view.outstanding = draws.randrange(500)
        fleet.add(view)
    for number in range(_PEERS):
        fleet.add(PeerView(ReplicaId(f"peer-{number}"), f"region-{number}"))
    for number in range(_NUM_SENT):
        asked = _request(number)
        decision = fleet.choose(asked, 99.0)
        fleet.finished(fleet.sent(asked, decision, 99.0), 99.5, 10)
    return fleet


def _request(number: int) -> Request:
    prompt = Random(f"prompt {number}").randbytes(_PREFIX_UNITS * UNIT_BYTES)
    return Request(RequestId(str(number)), _PREFIX_UNITS * BLOCK_TOKENS, prompt, 100)


def _taken_s(happen: Callable[[], object]) -> float:
    """Return the CPU time of one call in seconds: the median of some loops of calls."""
    began_s = time.process_time()
    happen()
    once_s = max(1e-7, time.process_time() - began_s)
    count = max(1, min(2000, int(_LOOP_S / once_s)))
    taken_s = []
    for _ in range(_REPEATS):
        began_s = time.process_time()
        for _ in range(count):
            happen()
        taken_s.append((time.process_time() - began_s) / count)
    return median(taken_s)


def _kept_bytes(make_it: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        kept = make_it()
        num_bytes, _ = tracemalloc.get_traced_memory()
        del kept
    finally:
        tracemalloc.stop()
    return num_bytes
