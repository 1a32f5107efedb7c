"""``banaserve simulate``: comparison of systems under one load, in virtual time."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from banaserve.base.arguments import option
from banaserve.base.errors import UserError
from banaserve.base.plugins.discovery import PluginGroup
from banaserve.cli.app import App
from banaserve.cli.plugins import use_plugins, warn_of_rivalries
from banaserve.cli.terminal.console import print_json, print_rows
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.costs.profile import ErrorSection, Profile
from banaserve.orchestrator.control.move_policies.registry import names
from banaserve.sim.cluster.cluster import SimCluster
from banaserve.sim.request import SimRequest
from banaserve.sim.result import SIMULATED
from banaserve.sim.system import KINDS
from banaserve_bench.results.figure_text import interval_text, row
from banaserve_bench.silicon import description as step_times
from banaserve_bench.silicon.description import StepTimesDescription
from banaserve_bench.silicon.install import install
from banaserve_bench.simulation import case as cases
from banaserve_bench.simulation.chrome_trace import ChromeTrace
from banaserve_bench.simulation.job import AskedSystem, SimulationJob, job
from banaserve_bench.simulation.lengths import DATASETS
from banaserve_bench.simulation.run import judged, simulate
from banaserve_bench.simulation.simulated_log import SimulatedLog

_EXIT_GOAL_MISSED = 1
_TELL_EVERY = 256
"""Number of requests between two updates of the progress bar."""
Row = tuple[str, ...]
_SHOWN = (
    ("finished, %", "finished_fraction", 100.0),
    ("goodput, %", "goodput_fraction", 100.0),
    ("requests/s", "requests_per_s", 1.0),
    ("tokens/s", "output_tokens_per_s", 1.0),
    ("total, s", "total_s", 1.0),
    ("mean latency, s", "e2e_mean_s", 1.0),
    ("ttft p50, ms", "ttft_p50_s", 1e3),
    ("ttft p99, ms", "ttft_p99_s", 1e3),
    ("tpot p50, ms", "tpot_p50_s", 1e3),
    ("tpot p99, ms", "tpot_p99_s", 1e3),
    ("busy, %", "busy_fraction", 100.0),
    ("cache hits, %", "cache_hit_fraction", 100.0),
    ("preemptions", "num_preemptions", 1.0),
    ("refused", "num_refused", 1.0),
    ("moves", "num_moves", 1.0),
)
_ERROR_OF = {
    "e2e_mean_s": "latency",
    "ttft_p99_s": "ttft_p99",
    "tpot_p99_s": "tpot_p99",
}
"""Errors of step times by the figures that they are of; medians are not judged."""
_MOST_MOVES = 20
"""Maximum number of moves shown for each system; JSON has all."""


@dataclass(frozen=True, kw_only=True)
class SimulateOptions(AskedSystem):
    """Options of ``banaserve simulate``: what is simulated, then how often and what is shown."""

    policy: str | None = option(
        f"policy of migration: {', '.join(names())}, or a plugin", None, metavar="NAME"
    )
    show_list: bool = option(
        "list the cases, loads and profiles that come with the package", False, name="--list"
    )
    step_times: Path | None = option(
        "description of measured step times, in place of those of the profile",
        None,
        Path,
        metavar="FILE",
    )
    seeds: int = option("number of runs, each with the next seed", 1)
    seed: int | None = option("seed of the first run (0; of a case: its own)", None, int)
    as_json: bool = option("print the results as JSON", False, name="--json")
    chrome_trace: Path | None = option(
        "file for steps, requests and moves of the first seed, for Perfetto",
        None,
        Path,
        metavar="FILE",
    )
    decision_log: Path | None = option(
        "file for decisions of the first seed, for `banaserve ui --replay`",
        None,
        Path,
        metavar="FILE",
    )


def simulate_command(options: SimulateOptions) -> int:
    """Simulate systems under a load, in virtual time; no engine runs."""
    use_plugins(PluginGroup.ROUTING_POLICIES, PluginGroup.MIGRATION_POLICIES)
    if options.show_list:
        print_rows(listing_rows(), {})
        return 0
    planned = job(options)
    systems = planned.systems.values()
    asked_names = [(PluginGroup.ROUTING_POLICIES, one.routing) for one in systems]
    asked_names += [(PluginGroup.MIGRATION_POLICIES, one.migration) for one in systems]
    warn_of_rivalries(*dict.fromkeys(asked_names))
    measured = None
    if options.step_times is not None:
        measured = step_times.read(options.step_times)
        if any(one.devices for one in systems):
            raise UserError("--step-times is of one device: the case has systems of several")
    return _compare(planned, options, measured)


def _compare(
    planned: SimulationJob, options: SimulateOptions, measured: StepTimesDescription | None
) -> int:
    """Run the job and show its results; return the exit code."""
    if options.seeds < 1:
        raise UserError(f"seeds is {options.seeds}: give 1 or more")
    first = planned.seed if options.seed is None else options.seed
    if options.seeds > 1 and not planned.is_drawn:
        raise UserError("--seeds has no effect on a trace's own arrivals: leave it out")
    trace = None
    if options.chrome_trace is not None:
        trace = ChromeTrace()
        # Written first, so that a path that cannot be written is reported before the work.
        trace.write(options.chrome_trace)
    log = _decision_log(planned, options.decision_log)
    outcomes = _run(planned, range(first, first + options.seeds), trace, log, measured)
    if trace is not None and options.chrome_trace is not None:
        trace.write(options.chrome_trace)
    if options.as_json:
        print_json(_as_json(planned, outcomes, measured))
    else:
        _show(planned, outcomes, measured)
    if log is not None:
        log.check()
    is_reached = all(outcome.get("is_reached", True) for outcome in outcomes)
    return 0 if is_reached else _EXIT_GOAL_MISSED


def _decision_log(planned: SimulationJob, path: Path | None) -> SimulatedLog | None:
    """Return the decision log; None if none is asked for.

    Raises:
        UserError: Several systems make decisions, or none does.
    """
    if path is None:
        return None
    if len(_deciding(planned)) != 1:
        raise UserError("--decision-log is of one system that moves modules: give it with --system")
    return SimulatedLog(path)


def _deciding(planned: SimulationJob) -> list[str]:
    return [name for name, one in planned.systems.items() if one.migration != "still"]


def _run(
    planned: SimulationJob,
    seeds: range,
    trace: ChromeTrace | None,
    log: SimulatedLog | None,
    measured: StepTimesDescription | None,
) -> list[dict[str, Any]]:
    """Return the results, one entry per seed; show progress in a bar on standard error."""
    total = planned.expected_requests * len(planned.systems) * len(seeds)
    columns = (TextColumn("{task.description}"), BarColumn(), TimeRemainingColumn())
    console = Console(stderr=True)
    is_silent = not console.is_terminal
    with Progress(*columns, console=console, transient=True, disable=is_silent) as progress:
        task = progress.add_task("simulating", total=total)
        outcomes = []
        for seed in seeds:
            results = {}
            for name, system in planned.systems.items():
                progress.update(task, description=f"simulating {name}, seed {seed}")
                decides = name in _deciding(planned)
                is_first = seed == seeds[0]
                watch = _watcher(
                    name,
                    system.migration,
                    trace if is_first else None,
                    log if is_first and decides else None,
                    planned.profile,
                    measured,
                )
                requests = _told(planned.requests(seed), lambda n: progress.advance(task, n))
                results[name] = simulate(
                    planned.profile, system, requests, planned.limits, planned.events, watch
                )
                if not results[name]["num_requests"]:
                    raise UserError(f"no request arrives with seed {seed}: give a longer load")
            outcomes.append(_outcome(planned, seed, results))
    return outcomes


def _watcher(
    name: str,
    policy: str,
    trace: ChromeTrace | None,
    log: SimulatedLog | None,
    profile: Profile,
    measured: StepTimesDescription | None,
) -> Callable[[SimCluster], None]:
    def watch(cluster: SimCluster) -> None:
        if measured is not None:
            install(cluster, profile, measured.times, measured.constants)
        if trace is not None:
            trace.watch(name, cluster)
        if log is not None:
            log.watch(policy, cluster)

    return watch


def _told(requests: Iterator[SimRequest], tell: Callable[[int], None]) -> Iterator[SimRequest]:
    for number, request in enumerate(requests, start=1):
        if number % _TELL_EVERY == 0:
            tell(_TELL_EVERY)
        yield request


def _outcome(planned: SimulationJob, seed: int, results: dict[str, Any]) -> dict[str, Any]:
    if planned.case is not None:
        return judged(planned.case, seed, results)
    return {"time": SIMULATED, "seed": seed, "systems": results}


def _as_json(
    planned: SimulationJob,
    outcomes: list[dict[str, Any]],
    measured: StepTimesDescription | None,
) -> dict[str, Any]:
    of_steps = {} if measured is None else {"step_times": measured_words(measured)}
    return {
        "time": SIMULATED,
        "target": planned.name,
        "about": planned.about,
        "profile": planned.profile.name,
        "profile_source": planned.profile.source,
        **of_steps,
        "runs": outcomes,
    }


def measured_words(measured: StepTimesDescription) -> dict[str, Any]:
    """Return where the step times are from, for which range, and how wrong they are."""
    texts = {key: getattr(measured, key) for key in ("name", "source", "valid_for", "judged_on")}
    known = {of: error for of, error in asdict(measured.error).items() if not math.isnan(error)}
    return {**texts, "error": known}


def _show(
    planned: SimulationJob,
    outcomes: list[dict[str, Any]],
    measured: StepTimesDescription | None,
) -> None:
    print(f"{planned.name}: {planned.about}")
    print(f"{SIMULATED}; profile {planned.profile.name} ({planned.profile.source})")
    if measured is not None:
        print(f"step times {measured.name} ({measured.source})")
        print(f"valid for {measured.valid_for}; errors are of {measured.judged_on}")
    error = planned.profile.error if measured is None else measured.error
    print(f"error of step times: {profiles.error_words(error)}")
    print()
    print_rows(result_rows(outcomes, error), {})
    if moves := move_rows(outcomes[0]):
        print()
        print_rows(moves, {})
    if goals := goal_rows(outcomes):
        print()
        print_rows(goals, {"reached": "green", "missed": "bold red"})


def result_rows(
    outcomes: Sequence[Mapping[str, Any]], error: ErrorSection | None = None
) -> list[Row]:
    """Return a row for each figure and a column for each system, with right-aligned numbers.

    Figures are those of a single run, or means of several runs with half the width of their 95%
    interval. Latencies carry the relative ``error`` of the step times if it is known.
    """
    systems = list(outcomes[0]["systems"])
    rows = [("figure", *systems)]
    for words, key, factor in _SHOWN:
        samples = [[factor * one["systems"][name][key] for one in outcomes] for name in systems]
        is_one = len(outcomes) == 1
        cells = row([one for [one] in samples]) if is_one else map(interval_text, samples)
        relative = getattr(error, _ERROR_OF[key]) if error and key in _ERROR_OF else math.nan
        band = "" if math.isnan(relative) else f" (±{relative:.1%})"
        rows.append((f"{words}{band}", *cells))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        (first, *(cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True)))
        for first, *cells in rows
    ]


def move_rows(outcome: Mapping[str, Any]) -> list[Row]:
    """Return the moves of the first run and their times; no rows if nothing was moved."""
    rows: list[Row] = []
    for name, result in outcome["systems"].items():
        steps = result["steps"]
        rows += [(name, f"{step['at_s']:.1f} s", step["step"]) for step in steps[:_MOST_MOVES]]
        if len(steps) > _MOST_MOVES:
            rows.append((name, "", f"and {len(steps) - _MOST_MOVES} more (see --json)"))
    return [("system", "at", "step"), *rows] if rows else []


def goal_rows(outcomes: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the goals of a case, each with its value in every run."""
    rows: list[Row] = []
    for outcome in outcomes:
        for goal in outcome.get("goals", ()):
            bound = f"at least {goal['at_least']:g}" if goal["at_least"] is not None else ""
            bound = bound or f"at most {goal['at_most']:g}"
            against = f" of {goal['relative_to']}'s" if goal["relative_to"] else ""
            rows.append(
                (
                    "reached" if goal["is_reached"] else "missed",
                    f"seed {outcome['seed']}",
                    goal["system"],
                    f"{goal['metric']} {bound}{against}",
                    f"{goal['value']:.4g}",
                )
            )
    return [("goal", "run", "system", "figure", "value"), *rows] if rows else []


def listing_rows() -> list[Row]:
    """Return what the package contains: cases, datasets, profiles and systems."""
    rows: list[Row] = [("case", name, cases.read(name).about) for name in cases.names()]
    rows += [
        ("dataset", name, "its lengths of prompts and answers; give --rps") for name in DATASETS
    ]
    rows += [("profile", name, profiles.load(name).source) for name in profiles.names()]
    told = {
        "banaserve": "prefill and decode apart, the global store, migration",
        "colocated": "every instance does both, as vLLM alone",
        "elastic": "roles and step sizes follow the load, as `serve --elastic`",
        "static": "prefill and decode apart, nothing moves",
    }
    rows += [("system", name, told[name]) for name in KINDS]
    return rows


app = App(simulate_command)
