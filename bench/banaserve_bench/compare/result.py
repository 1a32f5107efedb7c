"""Records that ``banaserve bench compare`` keeps of each system, and the result made of them."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from banaserve_bench.compare.systems import ServerSystem
from banaserve_bench.datasets.items import Dataset
from banaserve_bench.results import result
from banaserve_bench.results.result import ModelledTime
from banaserve_bench.serving.run import RunFolder, ServingPlan, figures
from banaserve_bench.serving.summary import Summary
from banaserve_bench.serving.timeline import InstanceTimeline

CHECK_TOKENS = 12
"""Number of tokens of each checked answer that are compared with the reference."""


_MAX_SAMPLES = 200
_TIME_IS_REAL = "server_cpu_s: CPU seconds of all of a system's processes for a request"
_TIME_IS_MODELLED = (
    "time is MODELLED: all seconds and rates are those of the profile's GPU and model, kept by "
    "paced engines; simulated: the simulator with the same requests"
)


class Workload(NamedTuple):
    """A dataset, its requests, and the sample whose answers are compared."""

    name: str
    dataset: Dataset
    plan: ServingPlan


class SystemRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Results of one system with one workload.

    Attributes:
        server_cpu_s: CPU seconds of all the system's processes per request of the workload.
        equal: Number of checked answers that equal the reference's.
        memory_bytes: Memory of all the system's processes after the workload, shared pages counted
            once.
        modelled: Data of the modelled time; None if time was real.
        decisions: Decisions of the orchestrator that began steps, in the form of ``decisions_of``.
    """

    cells: list[Summary]
    server_cpu_s: float
    checked: int
    equal: int
    memory_bytes: int
    modelled: ModelledTime | None = None
    timeline: InstanceTimeline = msgspec.field(default_factory=InstanceTimeline)
    decisions: list[dict[str, Any]] = []


def kept_path(given: argparse.Namespace, system: ServerSystem, workload: Workload) -> Path:
    """Return the path of the record of a complete run of ``system`` with ``workload``."""
    return Path(given.out) / "systems" / system.name / workload.name / "summaries" / "run.json"


def options_of(given: argparse.Namespace) -> dict[str, Any]:
    """Return the options that make two runs comparable, without folders of the machine."""
    names = (
        *("model", "pace", "dilate", "instances", "seeds", "requests", "duration", "warmup"),
        *("prompt_tokens", "prefix_tokens", "prefixes", "sessions", "output_tokens"),
        *("max_output_tokens", "slo_ttft", "slo_tpot", "check", "serve_option"),
    )
    found = {name: getattr(given, name) for name in names}
    return {name: list(one) if isinstance(one, tuple) else one for name, one in found.items()}


def folder_of(given: argparse.Namespace, system: ServerSystem, workload: Workload) -> RunFolder:
    """Return the folder of ``system``'s cells with ``workload``.

    Raises:
        UserError: The folder holds cells of other options.
    """
    asked = {
        **options_of(given),
        "system": system.name,
        "system_options": [*system.options, system.policy],
        "name": workload.name,
        "rps": list(workload.plan.loads),
    }
    return RunFolder(kept_path(given, system, workload).parent.parent, asked)


def check_folder(
    given: argparse.Namespace, systems: Sequence[ServerSystem], workloads: Sequence[Workload]
) -> None:
    """Check that all kept runs come from the same options.

    Raises:
        UserError: A kept run comes from other options, so it does not answer what is asked.
    """
    RunFolder(Path(given.out) / "systems", options_of(given))
    for system in systems:
        for workload in workloads:
            if kept_path(given, system, workload).is_file():
                folder_of(given, system, workload)


def complete_runs(
    given: argparse.Namespace, systems: Sequence[ServerSystem], workload: Workload
) -> dict[str, SystemRun]:
    """Return the runs with ``workload`` that are complete, by system."""
    paths = {system.name: kept_path(given, system, workload) for system in systems}
    return {
        name: msgspec.json.decode(path.read_bytes(), type=SystemRun)
        for name, path in paths.items()
        if path.is_file()
    }


def as_result(
    given: argparse.Namespace,
    systems: Sequence[ServerSystem],
    workload: Workload,
    ran: Mapping[str, SystemRun],
    simulated: Mapping[str, Sequence[Summary]],
    started_at: datetime,
) -> result.Result:
    """Return the result of one workload; its notes name the systems that have not run.

    Args:
        simulated: The simulator's cells by system; empty if time is real.
    """
    found: dict[str, result.Figure] = {}
    for name, one in ran.items():
        found |= figures(one.cells, f"{name}.")
        if one.modelled is None:
            found[f"{name}.server_cpu_s"] = result.figure([one.server_cpu_s], "s")
            found[f"{name}.memory"] = result.figure([one.memory_bytes], "bytes")
        if one.checked:
            found[f"{name}.equal_answers"] = result.figure([one.equal / one.checked], "fraction")
        if name in simulated:
            found |= figures(simulated[name], f"{name}.simulated.")
    return result.result(
        "compare",
        seed=given.seeds[0],
        options={
            **options_of(given),
            "rps": list(workload.plan.loads),
            "workload": workload.name,
        },
        started_at=started_at,
        figures=found,
        notes=_notes(given, systems, ran),
        raw={
            "systems": {name: _cells(one.cells) for name, one in ran.items()},
            "simulated": {
                name: _cells(simulated[name], with_samples=False)
                for name in ran
                if name in simulated
            },
            "timelines": {name: msgspec.to_builtins(one.timeline) for name, one in ran.items()},
            "decisions": {name: one.decisions for name, one in ran.items() if one.decisions},
        },
        modelled_time=[one.modelled for one in ran.values() if one.modelled is not None],
    )


def _notes(
    given: argparse.Namespace, systems: Sequence[ServerSystem], ran: Mapping[str, SystemRun]
) -> list[str]:
    changes = [
        f"{name}: {change}" for name, one in ran.items() for change in one.timeline.changes()
    ]
    checked = ", ".join(f"{name} {one.equal} of {one.checked}" for name, one in ran.items())
    return [
        *(f"INCOMPLETE: {one.name} has not run" for one in systems if one.name not in ran),
        *(f"{one.name}: {one.told()}" for one in systems),
        "one system after the other, the same requests at the same times; float32, one thread "
        "an engine",
        _TIME_IS_REAL if given.profile is None else _TIME_IS_MODELLED,
        f"equal answers: {checked}; {given.check} requests sent again, together, {CHECK_TOKENS} "
        "greedy tokens each, against one vLLM engine that got them one by one",
        *changes,
        "without a store each engine still has vLLM's own prefix cache",
    ]


def _cells(cells: Sequence[Summary], with_samples: bool = True) -> list[Any]:
    """Return the cells' figures, with as many samples as a plot of their distribution shows.

    Args:
        with_samples: False leaves them out, where no plot shows them.
    """
    slim = []
    for cell in cells:
        kept = {
            name: sorted(values)[:: -(-len(values) // _MAX_SAMPLES) or 1]
            for name, values in cell.samples.items()
            if with_samples and name != "itl"
        }
        slim.append(msgspec.to_builtins(msgspec.structs.replace(cell, samples=kept)))
    return slim
