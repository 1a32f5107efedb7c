"""Report of the results in a folder as one page of Markdown: ``banaserve bench report DIR``.

The answer in sentences first, then every figure with its 95% interval over the runs (Student's t)
and the best of each row marked; for serving runs the distributions of latency, and throughput and
latency over the load. Plots need matplotlib: pip install matplotlib.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from banaserve.base.arguments import Parser
from banaserve.base.errors import UserError
from banaserve_bench.report import drawing, tables
from banaserve_bench.report.section import Section, section_of
from banaserve_bench.results import result

_SKIPPED = ("run.json",)
_NUM_OPENING = 2


def make_parser() -> Parser:
    """Return the parser of the command's options."""
    parser = Parser(prog="banaserve bench report", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="with results, at any depth")
    parser.add_argument("--out", type=Path, help="folder of the page (default: DIR)")
    parser.add_argument("--title", default="Benchmarks of banaserve")
    return parser


def main(argv: Sequence[str]) -> int:
    """Write the page; return the exit code."""
    given = make_parser().parse_args(list(argv))
    print(write_report(given.folder, given.out or given.folder, given.title))
    return 0


def write_report(folder: Path, out: Path, title: str) -> Path:
    """Write report.md and its plots for all results below ``folder``; return the page's path.

    Without matplotlib the plots are left out; the page and standard error say so.

    Raises:
        UserError: There is no folder, no result in it, a file that is not a result, or no room to
            write.
    """
    sections = [section_of(result.read(path)) for path in result_files(folder)]
    problem = "" if drawing.is_possible() else drawing.MISSING
    if problem:
        print(problem, file=sys.stderr)
    page = out / "report.md"
    try:
        out.mkdir(parents=True, exist_ok=True)
        plots = [
            [] if problem else _drawn(section, out, number)
            for number, section in enumerate(sections, start=1)
        ]
        page.write_text(_markdown(title, sections, plots, problem))
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    return page


def result_files(folder: Path) -> list[Path]:
    """Return the result files at any depth; of a serving run's folder only its result.

    Raises:
        UserError: There is no such folder, or it holds no result.
    """
    if not folder.is_dir():
        raise UserError(f"there is no folder {folder}")
    found = [
        path
        for path in sorted(folder.rglob("*.json"))
        if path.name not in _SKIPPED and path.parent.name != "summaries"
    ]
    if not found:
        raise UserError(f"{folder} holds no results: write some there with bench NAME --json")
    return found


def _drawn(section: Section, out: Path, number: int) -> list[str]:
    """Write a section's plots as files; return their names from ``out``."""
    names = []
    for place, grid in enumerate(section.plots):
        names.append(f"plots/{number}-{place}.svg")
        (out / "plots").mkdir(exist_ok=True)
        (out / names[-1]).write_text(drawing.svg(grid))
    return names


def _markdown(
    title: str, sections: Sequence[Section], plots: Sequence[Sequence[str]], problem: str
) -> str:
    """Return the page: the answers first, then the figures, then the facts behind them.

    A page of several sections opens with the first sentences of each section.
    """
    parts = [f"# {title}"]
    if problem:
        parts.append(problem)
    if len(sections) > 1:
        opening = [f"{one.name}: {' '.join(one.answer[:_NUM_OPENING])}" for one in sections]
        parts.append(_list(opening))
    for section, names in zip(sections, plots, strict=True):
        parts += _section(section, names)
    return "\n\n".join(parts) + "\n"


def _section(section: Section, plots: Sequence[str]) -> list[str]:
    parts = [f"## {section.name}", _list(section.answer)]
    if not tables.is_empty(section.table):
        parts.append(tables.as_markdown(section.table))
    if section.table_note:
        parts.append(section.table_note)
    for grid, name in zip(section.plots, plots, strict=False):
        parts += [f"### {grid.title}", f"![{grid.title}]({name})"]
    for caption, table in section.more:
        parts += [f"### {caption}", tables.as_markdown(table)]
    parts += ["### What this rests on", "; ".join(section.facts)]
    if section.notes:
        parts.append(_list(section.notes))
    return parts


def _list(words: Sequence[str]) -> str:
    return "\n".join(f"- {one}" for one in words)
