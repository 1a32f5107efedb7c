"""Time of the orchestrator's decisions, and speed of the simulator.

``python -m benchmarks orchestrator``. A decision is one ``plan`` of a migration policy over a
number of instances: once over even loads, when there is nothing to do, and once over random loads,
when the policy fills its plan. The simulator is timed on a cluster under a load that it can serve,
from the first arrival to the last token, its cells distributed over as many processes as there are
cores. No engine is needed.
"""

from __future__ import annotations

import argparse
import os
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Sequence
from functools import partial
from math import log2

from banaserve.base.arguments import positive
from banaserve.base.errors import UserError
from banaserve.base.types import (
    ClusterView,
    InstanceFacts,
    InstanceId,
    InstanceReport,
    InstanceView,
    Role,
)
from banaserve.orchestrator.control.costs.profile import load as load_profile
from banaserve.orchestrator.control.move_policies import registry
from banaserve.sim.cluster.cluster import cells_of
from banaserve.sim.request import SimRequest
from banaserve.sim.system import System, preset
from banaserve_bench.results.statistics import median
from banaserve_bench.simulation.parallel import simulate_in_parts
from banaserve_bench.simulation.workload import Lengths, LoadPhase, drawn
from benchmarks.measurement import Measurement, parser_of, progress_of, with_units

_SIZES = (8, 64, 512, 4096)
_PROFILE = "opt-13b-a100"
EVEN, RANDOM = (0.5, 0.54), (0.0, 1.0)
"""Ranges of the compute and the memory load."""
_KINDS = (
    ("", "repaired", RANDOM),
    ("even_", "repaired", EVEN),
    ("published_", "published", RANDOM),
)
_NOW_S = 100.0
_ROLES = (("p", Role.PREFILL), ("d", Role.DECODE))
_UNITS = {
    "_ms_": "ms",
    "_per_s": "requests/s",
    "_per_cpu_s": "requests/s of CPU",
    "_n_log_n": "times n log n",
    "simulation_s": "s",
}
_NOTES = (
    "decision_ms_N: one plan of the repaired policy over N instances whose loads are drawn at "
    "random, so that the plan has as many steps as it may; decision_even_ms_N: loads within 0.04 "
    "of each other, nothing to do; decision_published_ms_N: the published policy over the random "
    "loads. CPU time of the process, the median of several plans a run",
    "decision_growth_n_log_n: time over 4,096 instances by that over 512, over the growth of "
    "n log n; at most 1 says that it grows no faster",
    "simulated_requests_per_s: wall time of all processes, each with its part of the cells; "
    "simulated_requests_per_cpu_s: the same by their CPU time together, which is what one core "
    "does, also on machines that others use",
)


def main(argv: Sequence[str]) -> int:
    given = _parse(argv)
    measurement = Measurement("orchestrator", given)
    samples: dict[str, list[float]] = defaultdict(list)
    raw = {}
    num_parts = given.runs * len(_SIZES) + given.sim_runs
    with progress_of(num_parts, "decisions") as advance:
        for run in range(given.runs):
            for size in _SIZES:
                _time_decisions(size, given.seed + run, samples)
                advance("decisions")
        for run in range(given.sim_runs):
            raw = _time_simulation(given, given.seed + run, samples)
            advance("simulations")
    figures = with_units(samples, _UNITS)
    measurement.deliver(measurement.result(figures, _NOTES, raw={"last_simulation": raw}))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("orchestrator", __doc__)
    add = parser.add_argument
    add("--runs", type=int, default=5, help="of the decisions, each over other loads")
    add("--sim-runs", type=int, default=1)
    add("--requests", type=int, default=1_000_000, help="about as many are simulated")
    add("--instances", type=int, default=1000, help="of the simulated cluster")
    add("--cell-size", type=int, default=8, help="instances under one router and one policy")
    add("--processes", type=positive, help="that simulate; else one a core, or one a cell")
    add("--rps", type=float, default=5.0, help="of each simulated instance")
    add("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    if given.runs < 1 or given.sim_runs < 0 or given.requests < 1:
        raise UserError("runs and requests are at least 1, sim-runs at least 0")
    num_cells = len(cells_of(system(given.instances, given.cell_size)))
    given.processes = given.processes or min(len(os.sched_getaffinity(0)), num_cells)
    return given


def _time_decisions(size: int, seed: int, samples: dict[str, list[float]]) -> None:
    repeats = max(3, min(20, 2048 // size))
    for prefix, policy, spread in _KINDS:
        view = cluster(size, seed, spread, load_profile(_PROFILE).facts)
        planner = registry.make(policy)
        taken_s = []
        for _ in range(repeats):
            began_s = time.process_time()
            planner.plan(view)
            taken_s.append(time.process_time() - began_s)
        samples[f"decision_{prefix}ms_{size}"].append(1e3 * median(taken_s))
    large, small = _SIZES[-1], _SIZES[-2]
    if size == large:
        grown = large * log2(large) / (small * log2(small))
        for prefix, _, _ in _KINDS:
            last = {n: samples[f"decision_{prefix}ms_{n}"][-1] for n in (small, large)}
            ratio = last[large] / last[small]
            samples[f"decision_{prefix}growth_n_log_n"].append(ratio / grown)


def cluster(size: int, seed: int, spread: tuple[float, float], facts: InstanceFacts) -> ClusterView:
    """Return ``size`` instances, half of them of each role, with loads drawn from ``spread``."""
    draws = random.Random(f"{seed} {size}")
    views = {}
    for number in range(size):
        letter, role = _ROLES[number % 2]
        name = InstanceId(f"{letter}{number:05}")
        compute, memory = draws.uniform(*spread), draws.uniform(*spread)
        report = InstanceReport(48, 0, memory, compute, _NOW_S, step_s=0.03)
        views[name] = InstanceView(name, role, True, report, 48, 0, 8000.0, facts)
    return ClusterView(_NOW_S, views)


def _time_simulation(
    given: argparse.Namespace, seed: int, samples: dict[str, list[float]]
) -> dict[str, object]:
    rate_per_s = given.rps * given.instances
    requests = partial(load, rate_per_s, given.requests, seed)
    measured = system(given.instances, given.cell_size)
    began_s, began_cpu_s = time.perf_counter(), _cpu_s()
    outcome = simulate_in_parts(load_profile(_PROFILE), measured, requests, given.processes)
    wall_s, cpu_s = time.perf_counter() - began_s, _cpu_s() - began_cpu_s
    num = outcome["num_finished"]
    samples["simulated_requests_per_s"].append(num / wall_s)
    samples["simulated_requests_per_cpu_s"].append(num / cpu_s)
    samples["simulation_s"].append(wall_s)
    return {name: value for name, value in outcome.items() if name != "steps"}


def system(instances: int, cell_size: int) -> System:
    """Return prefill and decode instances, half of the instances each, with migration.

    No prefixes are kept: the requests of ``load`` share none, and the cells then share nothing.

    Raises:
        UserError: There are too few instances or an odd number, or a cell would lack a role.
    """
    if instances < 2 or instances % 2:
        raise UserError(f"instances is {instances}: give an even number")
    half = instances // 2
    return preset("banaserve", prefill=half, decode=half, cell_size=cell_size, cache="none")


def load(rate_per_s: float, requests: int, seed: int) -> Iterator[SimRequest]:
    """Yield about ``requests`` requests: Poisson arrivals, chat-like lengths."""
    phase = LoadPhase(
        duration_s=requests / rate_per_s,
        rate_per_s=rate_per_s,
        prompt=Lengths(kind="lognormal", mean=250, high=1500),
        output=Lengths(kind="lognormal", mean=100, high=500),
    )
    return drawn([phase], seed)


def _cpu_s() -> float:
    """Return the CPU time of this process and of the children that it has waited for."""
    return sum(os.times()[:4])
