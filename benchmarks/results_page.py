"""Pages of all committed results, built from the files of ``results/`` and not committed.

    python -m benchmarks results [--out build/docs/benchmarks]    # prints where the first page is

``RESULTS.md`` has a section for each result; results of simulations also have pages of their own,
with plots, which need matplotlib. The pages depend only on the result files, the list
of benchmarks and, as to which results are stale, the code since. ``make docs`` builds them into the
site.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

from banaserve.base.arguments import Parser
from banaserve.base.errors import UserError
from banaserve_bench.report import plots, tables
from banaserve_bench.report.report import facts_of, result_files, systems_of
from banaserve_bench.results import result
from banaserve_bench.results.result import Result
from benchmarks.break_even import page as break_even
from benchmarks.location import ROOT
from benchmarks.measured_code import MEASURED, History
from benchmarks.registry import BENCHMARKS
from benchmarks.simulate_paper import report as simulate_paper
from benchmarks.simulate_paper.runs import FIGURES
from benchmarks.simulate_seeds import report as simulate_seeds

RESULTS = ROOT / "benchmarks" / "results"
BUILT = ROOT / "build" / "docs" / "benchmarks"
NAME = "RESULTS.md"
MAX_FIGURES = 110
COMMAND = "python -m benchmarks results"

# Figures that are shown of results with more figures than a page holds. A result that has a table
# or a page of its own (``compare``, the simulations) shows or links that one.
_SHOWN = {
    "elastic-paced": (
        "*_ratio",
        "*_ratio_min",
        "*.paced.goodput",
        "*.paced.tokens_per_s",
        "*.paced.ttft_mean_s",
    ),
    "migration": ("layers_10.*", "stop_and_copy_10.*", "heads_2.*", "batch.*"),
}
OWN_PAGES: Mapping[str, Callable[[Result], str]] = MappingProxyType(
    {
        "break-even": break_even.page,
        "simulate-paper": simulate_paper.markdown,
        "simulate-seeds": simulate_seeds.markdown,
    }
)
"""Pages of results that have one of their own beside their file, by benchmark."""


class Asked(NamedTuple):
    """Question of a benchmark, and the command that runs it."""

    question: str
    command: str


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=COMMAND, description=__doc__)
    parser.add_argument("--out", type=Path, default=BUILT, metavar="DIR")
    out = parser.parse_args(list(argv)).out
    try:
        print(build(out))
    except OSError as error:
        raise UserError(f"cannot write {error.filename or out}: {error.strerror}") from error
    return 0


def build(out: Path) -> Path:
    """Write all pages, their plots and the result files below ``out``; return the first page.

    Raises:
        UserError: matplotlib is missing, there is no result, or a file is not one.
    """
    if not plots.is_possible():
        raise UserError("the package matplotlib is missing: pip install matplotlib")
    for path in result_files(RESULTS):
        copy = out / "results" / path.relative_to(RESULTS)
        copy.parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(path, copy)
        _write_own_page(result.read(path), copy.with_suffix(".md"))
    first = out / NAME
    first.write_text(page(RESULTS, stale_results(RESULTS)))
    return first


def built_pages() -> frozenset[Path]:
    """Return the pages that ``build`` writes, from its folder."""
    files = [path.relative_to(RESULTS.parent) for path in result_files(RESULTS)]
    own = {path.with_suffix(".md") for path in files if path.stem in OWN_PAGES}
    return frozenset({Path(NAME)} | own)


def site_link(place: Path) -> str | None:
    """Return where the built pages show a result file, or all of them, from their folder.

    None if ``place`` is neither.
    """
    if place == RESULTS:
        return NAME
    if not place.is_relative_to(RESULTS):
        return None
    path = place.relative_to(RESULTS)
    if place.stem in OWN_PAGES:
        return f"results/{path.with_suffix('.md')}"
    return f"{NAME}#{_anchor(_title(path))}"


def _write_own_page(record: Result, path: Path) -> None:
    name = _name(record)
    if name in OWN_PAGES:
        path.write_text(OWN_PAGES[name](record))
    if name == "simulate-paper":
        for figure in FIGURES:
            drawn = path.with_name(simulate_paper.picture_name(figure))
            drawn.write_text(simulate_paper.picture(record, figure))


def stale_results(folder: Path) -> frozenset[Path] | None:
    """Return the committed results, from ``folder``, whose measured code has changed since.

    None if that is unknown, as it is without the whole history.

    Raises:
        UserError: The code that a result's benchmark measures is not declared.
    """
    history = History(ROOT)
    is_whole = history.is_whole()
    found = set()
    for path in result_files(folder):
        record = result.read(path)
        measured = MEASURED.get(_name(record))
        if measured is None:
            raise UserError(f"benchmarks/measured_code.py does not say what {record.name} measures")
        commit = history.measured_at(record.commit, path) if is_whole else None
        if commit is not None and history.has_changed(commit, measured):
            found.add(path.relative_to(folder))
    return frozenset(found) if is_whole else None


def page(folder: Path, stale_paths: Collection[Path] | None = ()) -> str:
    """Return the page of all results below ``folder``, in the order of their paths.

    Args:
        stale_paths: Stale results, as paths from ``folder``; None if they are unknown.

    Raises:
        UserError: There is no result, or a file is not one.
    """
    parts = [
        f"# Results\n\nBuilt by `{COMMAND}` from the files of\n`benchmarks/results/`. One section "
        "a result. Figures are medians over the runs, with the smallest\nand largest run and the "
        "mean with its 95% interval (Student's t). `benchmarks/README.md`\nsays what each "
        "figure means and what this system loses, `benchmarks/LOG.md` what did not work.\nWhere a "
        "machine has no GPU, nothing was measured on one.\n\nA result is stale where a statement "
        "of the code that it measures has changed since\n(`benchmarks/measured_code.py` says which "
        "code that is): run anew it may differ."
    ]
    paths = result_files(folder)
    records = [(path.relative_to(folder), result.read(path)) for path in paths]
    parts.append(_contents(records, stale_paths))
    parts += [_section(path, record, path in (stale_paths or ())) for path, record in records]
    return "\n\n".join(parts) + "\n"


def asked(record: Result) -> Asked:
    """Return question and command of a result's benchmark.

    Raises:
        UserError: The list of benchmarks lacks this benchmark.
    """
    name = _name(record)
    if name not in BENCHMARKS:
        raise UserError(f"the list of benchmarks has no {name}: add it to benchmarks/registry.py")
    arguments = _arguments(record)
    suffix = f" ARGS='{arguments}'" if arguments else ""
    command = f"make bench NAME={name}{suffix}"
    return Asked(BENCHMARKS[name].question, command)


def _name(record: Result) -> str:
    """Return the benchmark's name as it is typed; older results have underscores in it."""
    return record.name.replace("_", "-")


def _arguments(record: Result) -> str:
    """Return the option that decides which of a benchmark's questions a result answers."""
    if (part := record.options.get("part", "runs")) != "runs":
        return f"--part {part}"
    profile = record.options.get("pace")
    return "" if profile in (None, "None") else f"--pace {profile}"


def _contents(records: Sequence[tuple[Path, Result]], stale_paths: Collection[Path] | None) -> str:
    table = [["Result", "Question", "Date", "Code since"]]
    for path, record in records:
        title = _title(path)
        date = f"{record.started_at:%Y-%m-%d}"
        state = "unknown: the history is not whole"
        if stale_paths is not None:
            state = "changed: stale" if path in stale_paths else "the same"
        table.append([f"[{title}](#{_anchor(title)})", asked(record).question, date, state])
    return tables.as_markdown(table)


def _section(path: Path, record: Result, is_stale: bool) -> str:
    question, command = asked(record)
    facts = [
        f"- Question: {question}",
        f"- Command: `{command}`",
        f"- File: [{path}](results/{path})",
        f"- {'; '.join(filter(None, facts_of(record)))}",
    ]
    if is_stale:
        facts.append(f"- STALE: the code that {path} measures has changed since")
    parts = [f"## {_title(path)}", "\n".join(facts), _figures(path, record)]
    if record.notes:
        parts.append("\n".join(f"- {' '.join(note.split())}" for note in record.notes))
    return "\n\n".join(parts)


def _figures(path: Path, record: Result) -> str:
    own = path.with_suffix(".md") if _name(record) in OWN_PAGES else None
    if own and len(record.figures) > MAX_FIGURES:
        return f"{len(record.figures)} figures, in tables of their own: [{own}](results/{own})."
    if "systems" in record.raw:
        systems = systems_of(record)
        table = tables.as_markdown(tables.serving_table(systems))
        return f"{table}\n\n{tables.MARKS}" if len(systems) > 1 else table
    shown = record.figures
    if len(shown) > MAX_FIGURES:
        patterns = _SHOWN.get(_name(record), ())
        shown = {
            name: one
            for name, one in shown.items()
            if any(fnmatch(name, pattern) for pattern in patterns)
        }
        if not shown:
            raise UserError(f"{path} has too many figures: choose some in {Path(__file__).name}")
    left = len(record.figures) - len(shown)
    rest = f"\n\n{left} more figures are in the file." if left else ""
    rest += f"\n\nOn a page of its own: [{own}](results/{own})." if own else ""
    return tables.as_markdown(tables.figure_table(shown)) + rest


def _title(path: Path) -> str:
    return str(path.with_suffix(""))


def _anchor(title: str) -> str:
    return title.lower().replace("/", "")
