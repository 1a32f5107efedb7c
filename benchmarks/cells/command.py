"""Simulation of ten thousand instances in five regions, and the cost of their control plane.

``python -m benchmarks cells``. Every cell has its own router and controller, every region a
balancer over its cells that knows the balancers of the other regions; the policies are those of
real servers. Machines die and come back empty. In addition, without a simulation: the cost of one
decision of a router, of a controller and of a balancer, over growing numbers of instances or cells.

``--data FOLDER`` takes the round trips between regions from ``rtt/skyplane_rtt_ms.csv.zst`` in that
folder; ``--data FILE`` from that file.
"""

from __future__ import annotations

import argparse
import resource
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress

from banaserve.base.arguments import positive
from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs.profile import load as load_profile
from banaserve_bench.results.result import Result
from banaserve_route.sim.cells_load import CellsLoad
from banaserve_route.sim.cells_world import CellsSetting, CellsWorld
from banaserve_route.sim.round_trips import FIVE_REGIONS, read_round_trips
from benchmarks.cells import growth
from benchmarks.measurement import Measurement, parser_of, with_units

_PROFILE = "opt-13b-a100"
_ROUND_TRIPS = Path("rtt/skyplane_rtt_ms.csv.zst")
_UNITS = {
    "simulated_requests": "requests/s of CPU",
    "simulated_events": "events/s of CPU",
    "messages_a_request": "messages",
    "reports_a_region": "reports",
    "kib": "KiB",
    "mib": "MiB",
    "_us_": "us",
    "_ms_": "ms",
    "num_": "count",
    "lost_or_doubled": "count",
    "_fraction": "fraction",
    "_s": "s",
}
_NOTES = (
    "router_us_N: one choice of load_aware over a cell of N instances; controller_ms_N: one turn "
    "of a cell's controller, smoothing and a plan of the repaired policy, over loads drawn at "
    "random; balancer_us_N: one choice of skywalker over N cells and four peers, of a prompt that "
    "is in no cache. CPU time of the process, the median of several a run",
    "kib_of_instance_N, kib_of_cell_N: what router and controller keep of an instance, and a "
    "balancer of a cell without the prefixes it has been sent, by tracemalloc",
    "simulated: virtual time of modelled engines, one process. simulator_kib_of_instance is what "
    "the process has grown by while the instances were made; peak_mib is all of the process in "
    "the end. messages_a_request are those of the balancers: a request is one, and so are its "
    "first token and its end, at each balancer that it passes; reports_a_region_per_s are what "
    "its balancer is told by its cells and its peers; every seed has its own arrivals and deaths",
)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark, writing the result after each part; return the exit code."""
    given = _parse(argv)
    setting = _setting(given)
    profile = load_profile(_PROFILE)
    measurement = Measurement("cells", given)
    samples: dict[str, list[float]] = defaultdict(list)
    raw: dict[str, Any] = {"simulations": []}

    def record() -> Result:
        return measurement.result(with_units(samples, _UNITS), _NOTES, raw=raw)

    with Progress(transient=True, console=Console(stderr=True)) as progress:
        # The memory of an instance is measured while the process is still small.
        for run in range(given.sim_runs):
            shown = _shown(progress, setting)
            raw["simulations"].append(_simulate(setting, profile, given.seed + run, samples, shown))
            measurement.keep(record())
        num_growths = sum(len(sizes) for _, sizes, _ in _GROWTHS)
        task = progress.add_task("decisions", total=given.runs * num_growths)
        for run in range(given.runs):
            _time_decisions(given.seed + run, samples, lambda: progress.advance(task))
            measurement.keep(record())
    measurement.deliver(record())
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("cells", __doc__)
    add = parser.add_argument
    add("--runs", type=int, default=5, help="of the decisions, each over other loads")
    add("--sim-runs", type=int, default=1, help="of the simulation, each with its own seed")
    add("--instances", type=positive, default=10_000, help="in all regions")
    add("--regions", type=int, default=5, help=f"the first of {', '.join(FIVE_REGIONS)}")
    add("--cell-size", type=positive, default=32, help="instances under one router and controller")
    add("--node-size", type=positive, default=8, help="instances of one machine")
    add("--rps", type=float, default=3.0, help="mean arrivals a second for each instance")
    add("--duration", type=float, default=20.0, help="virtual seconds in which requests arrive")
    add("--node-deaths", type=int, default=40, help="machines that die meanwhile")
    add("--back-after", type=float, default=10.0, help="seconds until one serves again, empty")
    add("--notice", type=float, default=2.5, help="seconds until a death is noticed")
    add("--policy", default="skywalker", help="of the balancers")
    add("--migration", default="repaired", help="of the controllers")
    add("--data", type=Path, help="folder or file with measured round trips")
    add("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    if given.runs < 0 or given.sim_runs < 0 or given.runs + given.sim_runs < 1:
        raise UserError("runs and sim-runs are 0 or more, one of them at least 1")
    if not 1 <= given.regions <= len(FIVE_REGIONS):
        raise UserError(f"regions is {given.regions}: give 1 to {len(FIVE_REGIONS)}")
    return given


def _setting(given: argparse.Namespace) -> CellsSetting:
    regions = FIVE_REGIONS[: given.regions]
    load = CellsLoad(
        duration_s=given.duration, rate_per_s=given.rps * given.instances / given.regions
    )
    setting = CellsSetting(
        instances=given.instances,
        regions=regions,
        cell_size=given.cell_size,
        node_size=given.node_size,
        load=load,
        node_deaths=given.node_deaths,
        back_after_s=given.back_after,
        notice_s=given.notice,
        policy=given.policy,
        migration=given.migration,
    )
    if given.data is None:
        return setting
    path = given.data / _ROUND_TRIPS if given.data.is_dir() else given.data
    return replace(setting, round_trips_ms=read_round_trips(path, regions))


Shown = Callable[[float, int], None]


def _shown(progress: Progress, setting: CellsSetting) -> Shown:
    """Return a callback of virtual time, which shows a bar."""
    name = f"{setting.instances} instances"
    task = progress.add_task(name, total=setting.load.duration_s)

    def told(now_s: float, num_ended: int) -> None:
        words = f"{name}: {num_ended} requests have ended"
        progress.update(task, completed=now_s, description=words)

    return told


def _simulate(
    setting: CellsSetting,
    profile: Any,
    seed: int,
    samples: dict[str, list[float]],
    shown: Shown,
) -> dict[str, Any]:
    before_kib = _peak_kib()
    began_s, began_cpu_s = time.perf_counter(), time.process_time()
    world = CellsWorld(setting, profile, seed)
    built_kib = _peak_kib()
    world.run(shown)
    wall_s, cpu_s = time.perf_counter() - began_s, time.process_time() - began_cpu_s
    found = world.result()
    figures = {
        "simulation_s": wall_s,
        "simulated_requests_per_cpu_s": found["num_ended"] / cpu_s,
        "simulated_events_per_cpu_s": found["num_events"] / cpu_s,
        "simulator_kib_of_instance": (built_kib - before_kib) / setting.instances,
        "peak_mib": _peak_kib() / 1024,
        "messages_a_request": found["request_messages"] / max(1, found["num_sent"]),
        "reports_a_region_per_s": found["report_messages"]
        / len(setting.regions)
        / found["total_s"],
        "lost_or_doubled_requests": found["num_lost"] + found["num_doubled"],
        **{name: found[name] for name in _TOLD},
    }
    for name, value in figures.items():
        samples[name].append(value)
    return found


_TOLD = (
    "num_ended",
    "num_restarted",
    "num_sent_back",
    "num_node_deaths",
    "num_cells",
    "num_moves",
    "forwarded_fraction",
    "handed_far_fraction",
    "cache_hit_fraction",
    "ttft_p50_s",
    "ttft_p99_s",
    "tpot_p50_s",
    "tpot_p99_s",
)


def _peak_kib() -> float:
    return float(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)


def _time_decisions(
    seed: int, samples: dict[str, list[float]], advance: Callable[[], None]
) -> None:
    for name, sizes, measure in _GROWTHS:
        for size in sizes:
            samples[f"{name}_{size}"].append(measure(size, seed))
            advance()


_GROWTHS = (
    ("router_us", growth.INSTANCES, growth.router_us),
    ("controller_ms", growth.INSTANCES, growth.controller_ms),
    ("balancer_us", growth.CELLS, growth.balancer_us),
    ("kib_of_instance", growth.INSTANCES, growth.kib_of_instance),
    ("kib_of_cell", growth.CELLS, growth.kib_of_cell),
)
