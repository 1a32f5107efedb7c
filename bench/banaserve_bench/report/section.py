"""A result as a section of a report: its answer, its tables, its plots, and what they rest on."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import msgspec

from banaserve.base.errors import UserError
from banaserve_bench.report.compare_tables import extra_tables
from banaserve_bench.report.plots import PlotGrid, grids_of
from banaserve_bench.report.sentences import answer_of
from banaserve_bench.report.tables import MARKS, Table, figure_table, serving_table
from banaserve_bench.results.result import Result
from banaserve_bench.serving.summary import Summary


@dataclass(frozen=True, slots=True)
class Section:
    """Section of one result; the first row of a table holds headings.

    Attributes:
        answer: Sentences, the most important first.
        table_note: Meaning of the marks in the table; empty if it has none.
        more: Further tables, each with a caption.
    """

    name: str
    answer: list[str]
    facts: list[str]
    table: Table
    plots: list[PlotGrid]
    notes: list[str]
    table_note: str = ""
    more: list[tuple[str, Table]] = field(default_factory=list)


def section_of(record: Result) -> Section:
    """Return the section of a result.

    Raises:
        UserError: The record claims to be a serving run, but its cells are invalid.
    """
    systems = _systems(record)
    more = []
    if "systems" in record.raw:
        simulated = _cells(record, record.raw.get("simulated"))
        more = extra_tables(record.options, record.raw, systems, simulated)
    workload = record.options.get("workload")
    return Section(
        name=f"{record.name}: {workload}" if workload else record.name,
        answer=answer_of(record, systems),
        facts=_facts(record),
        table=serving_table(systems) if systems else figure_table(record.figures),
        plots=grids_of(systems, record.raw.get("timelines", {})),
        notes=record.notes,
        table_note=MARKS if len(systems) > 1 else "",
        more=more,
    )


def _facts(record: Result) -> list[str]:
    return [
        f"commit {record.commit[:9] if record.commit else 'unknown'}"
        + (" with changes" if record.dirty else ""),
        f"{record.machine.num_cores} x {record.machine.cpu_model}"
        + (f", {record.machine.gpu}" if record.machine.gpu else ""),
        f"vLLM {record.versions.vllm}, Python {record.versions.python}",
        f"seed {record.seed}",
        f"{record.started_at:%Y-%m-%d}",
        ", ".join(f"{name}={value}" for name, value in record.options.items() if value is not None),
        *_of_modelled_time(record),
    ]


def _of_modelled_time(record: Result) -> list[str]:
    if not record.modelled_time:
        return []
    profiles = {f"{one.profile} ({one.source})" for one in record.modelled_time}
    dilations = sorted({f"{one.dilation:g}" for one in record.modelled_time})
    overran = [f"{one.num_overrun / max(1, one.num_steps):.1%}" for one in record.modelled_time]
    return [
        f"time is MODELLED, not measured: {', '.join(sorted(profiles))}",
        f"a modelled second took {' or '.join(dilations)} s; steps that overran, by server: "
        f"{', '.join(overran)}",
    ]


def _systems(record: Result) -> dict[str, list[Summary]]:
    """Return the cells of a serving run or a comparison by system; empty for other results."""
    raw = record.raw.get("systems")
    if raw is None and "cells" in record.raw:
        raw = {record.options.get("system") or record.name: record.raw["cells"]}
    return _cells(record, raw)


def _cells(record: Result, raw: Any) -> dict[str, list[Summary]]:
    try:
        found = msgspec.convert(raw or {}, type=dict[str, list[Summary]])
    except msgspec.ValidationError as error:
        raise UserError(f"a result of {record.name} has cells that are none: {error}") from error
    return {name: cells for name, cells in found.items() if cells}
