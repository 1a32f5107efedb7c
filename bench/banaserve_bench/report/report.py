"""Report of the results in a folder as one page, HTML and Markdown: ``banaserve bench report DIR``.

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
from banaserve_bench.report import drawing
from banaserve_bench.report.pages import as_html, as_markdown
from banaserve_bench.report.section import section_of
from banaserve_bench.results import result

_SKIPPED = ("run.json",)


def make_parser() -> Parser:
    """Return the parser of the command's options."""
    parser = Parser(prog="banaserve bench report", description=__doc__)
    parser.add_argument("folder", type=Path, metavar="DIR", help="with results, at any depth")
    parser.add_argument("--out", type=Path, help="folder of the pages (default: DIR)")
    parser.add_argument("--title", default="Benchmarks of banaserve")
    return parser


def main(argv: Sequence[str]) -> int:
    """Write both pages; return the exit code."""
    given = make_parser().parse_args(list(argv))
    pages = write_report(given.folder, given.out or given.folder, given.title)
    for page in pages:
        print(page)
    return 0


def write_report(folder: Path, out: Path, title: str) -> list[Path]:
    """Write report.html, report.md and its plots for all results below ``folder``.

    Without matplotlib the plots are left out; both pages and standard error say so.

    Raises:
        UserError: There is no folder, no result in it, a file that is not a result, or no room to
            write.
    """
    sections = [section_of(result.read(path)) for path in result_files(folder)]
    problem = "" if drawing.is_possible() else drawing.MISSING
    if problem:
        print(problem, file=sys.stderr)
    drawn = [[] if problem else [drawing.svg(grid) for grid in one.plots] for one in sections]
    html, markdown = out / "report.html", out / "report.md"
    try:
        out.mkdir(parents=True, exist_ok=True)
        names = _written(drawn, out)
        html.write_text(as_html(title, sections, drawn, problem))
        markdown.write_text(as_markdown(title, sections, names, problem))
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    return [html, markdown]


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


def _written(drawn: Sequence[Sequence[str]], out: Path) -> list[list[str]]:
    """Write each section's plots as files; return their names."""
    names = [
        [f"plots/{number}-{place}.svg" for place in range(len(svgs))]
        for number, svgs in enumerate(drawn, start=1)
    ]
    for section, svgs in zip(names, drawn, strict=True):
        for name, document in zip(section, svgs, strict=True):
            (out / "plots").mkdir(exist_ok=True)
            (out / name).write_text(document)
    return names
