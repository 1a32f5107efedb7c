"""What ``banaserve bench compare`` keeps of each system, and the result made of it."""

from __future__ import annotations

import argparse
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from banaserve.bench import result
from banaserve.bench.compare_systems import System
from banaserve.bench.compare_timeline import Timeline
from banaserve.bench.provenance import ModelledTime
from banaserve.bench.serving_items import Dataset
from banaserve.bench.serving_run import Plan, RunFolder, figures
from banaserve.bench.serving_summary import Summary

CHECK_TOKENS = 12
"""Tokens of each answer that is compared with the reference."""


class Workload(NamedTuple):
    """A dataset, its requests, and the sample whose answers are compared."""

    name: str
    dataset: Dataset
    plan: Plan


class SystemRun(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one system did with one workload.

    Attributes:
        server_cpu_s: CPU seconds of all its processes for a request of the workload.
        equal: How many of the checked answers were those of the reference.
        memory_bytes: Of all its processes after the workload, shared pages counted once.
        modelled: Where its time was modelled.
    """

    cells: list[Summary]
    server_cpu_s: float
    checked: int
    equal: int
    memory_bytes: int
    modelled: ModelledTime | None = None
    timeline: Timeline = msgspec.field(default_factory=Timeline)


def kept_path(given: argparse.Namespace, system: System, workload: Workload) -> Path:
    """Returns where a complete run of ``system`` with ``workload`` is kept."""
    return Path(given.out) / "systems" / system.name / workload.name / "summaries" / "run.json"


def options_of(given: argparse.Namespace) -> dict[str, Any]:
    """Returns what makes two runs comparable, without folders of the machine."""
    names = ("model", "instances", "requests", "prompt_tokens", "prefix_tokens", "prefixes")
    return {
        **{name: getattr(given, name) for name in names},
        "sessions": given.sessions,
        "output_tokens": given.output_tokens,
        "rps": list(given.rps),
        "seeds": list(given.seeds),
        "warmup": given.warmup,
        "check": given.check,
        "serve_option": given.serve_option,
    }


def folder_of(given: argparse.Namespace, system: System, workload: Workload) -> RunFolder:
    """Returns where ``system``'s cells with ``workload`` are kept.

    Raises:
        UserError: It holds those of other options.
    """
    asked = {
        **options_of(given),
        "system": system.name,
        "system_options": list(system.options),
        "name": workload.name,
    }
    return RunFolder(kept_path(given, system, workload).parent.parent, asked)


def check_folder(
    given: argparse.Namespace, systems: Sequence[System], workloads: Sequence[Workload]
) -> None:
    """Returns if whatever is kept already comes from the same options.

    Raises:
        UserError: It does not: what is complete there is no answer to what is asked.
    """
    RunFolder(Path(given.out) / "systems", options_of(given))
    for system in systems:
        for workload in workloads:
            if kept_path(given, system, workload).is_file():
                folder_of(given, system, workload)


def complete_runs(
    given: argparse.Namespace, systems: Sequence[System], workload: Workload
) -> dict[str, SystemRun]:
    """Returns the runs with ``workload`` that are complete, by system."""
    paths = {system.name: kept_path(given, system, workload) for system in systems}
    return {
        name: msgspec.json.decode(path.read_bytes(), type=SystemRun)
        for name, path in paths.items()
        if path.is_file()
    }


def as_result(
    given: argparse.Namespace,
    systems: Sequence[System],
    workload: Workload,
    ran: Mapping[str, SystemRun],
    started_at: datetime,
) -> result.Result:
    """Returns the result of one workload; says which systems have not run."""
    found: dict[str, result.Figure] = {}
    for name, one in ran.items():
        found |= figures(one.cells, f"{name}.")
        found[f"{name}.server_cpu_s"] = result.figure([one.server_cpu_s], "s")
        found[f"{name}.memory"] = result.figure([one.memory_bytes], "bytes")
        if one.checked:
            found[f"{name}.equal_answers"] = result.figure([one.equal / one.checked], "fraction")
    return result.result(
        "compare",
        seed=given.seeds[0],
        options={**options_of(given), "workload": workload.name},
        started_at=started_at,
        figures=found,
        notes=[
            *(f"INCOMPLETE: {one.name} has not run" for one in systems if one.name not in ran),
            *(f"{one.name}: {one.question} ({' '.join(one.options)})" for one in systems),
            "one system after the other, the same requests at the same times; float32, one thread "
            "an engine",
            "server_cpu_s: CPU seconds of all of a system's processes for a request",
            f"equal_answers: {given.check} requests sent again, together, {CHECK_TOKENS} greedy "
            "tokens each, against one vLLM engine that got them one by one",
            *(
                f"{name}: {change}"
                for name, one in ran.items()
                for change in one.timeline.changes()
            ),
            "without a store each engine still has vLLM's own prefix cache",
        ],
        raw={
            "systems": {name: msgspec.to_builtins(one.cells) for name, one in ran.items()},
            "timelines": {name: msgspec.to_builtins(one.timeline) for name, one in ran.items()},
        },
        modelled_time=[one.modelled for one in ran.values() if one.modelled is not None],
    )
