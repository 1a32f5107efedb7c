"""Picture of the headline result for README, from the committed file of ``elastic-paced``.

``python -m benchmarks pictures [--out docs/pictures]`` draws it. The other picture, of the page, is
made by the page's test in a browser; ``make pictures`` makes both.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from banaserve.base.arguments import Parser
from banaserve.base.errors import UserError
from banaserve_bench.report import plots
from banaserve_bench.report.plots import LIGHT
from banaserve_bench.results import result
from banaserve_bench.results.figure_text import row
from banaserve_bench.results.result import Result
from benchmarks.elastic.paced import COLOCATED, ELASTIC
from benchmarks.location import ROOT

SOURCE = ROOT / "benchmarks" / "results" / "elastic-paced.json"
FOLDER = ROOT / "docs" / "pictures"
NAME = "elastic-paced.svg"
COMMAND = "python -m benchmarks pictures"
_AHEAD, _BEHIND, _EVEN = LIGHT.lines[2], LIGHT.lines[1], LIGHT.lines[6]
_EVEN_FRACTION = 0.005


class CellPair(NamedTuple):
    """A figure of one cell, for the elastic system and for colocated engines."""

    ours: float
    theirs: float

    @property
    def ratio(self) -> float:
        return self.ours / self.theirs


class HeadlineFigure(NamedTuple):
    """A column of the picture.

    Attributes:
        factor: Factor from the result's unit to the unit that is shown.
        is_more_better: True if a ratio above one is a gain, False if one below is.
    """

    words: str
    key: str
    factor: float
    unit: str
    is_more_better: bool

    def gain(self, one: CellPair) -> float:
        """Return by how much the elastic system is better; 0 within half a percent."""
        gain = one.ratio - 1 if self.is_more_better else 1 - one.ratio
        return gain if abs(gain) > _EVEN_FRACTION else 0.0


FIGURES = (
    HeadlineFigure("Requests in time", "goodput", 100.0, "%", True),
    HeadlineFigure("Output tokens/s", "tokens_per_s", 1.0, "", True),
    HeadlineFigure("Mean time to first token", "ttft_mean_s", 1e3, "ms", False),
)


def main(argv: Sequence[str]) -> int:
    parser = Parser(prog=COMMAND, description=__doc__)
    parser.add_argument("--out", type=Path, default=FOLDER)
    given = parser.parse_args(list(argv))
    if not plots.is_possible():
        raise UserError("the package matplotlib is missing: pip install matplotlib")
    document = headline(result.read(SOURCE))
    path = given.out / NAME
    given.out.mkdir(parents=True, exist_ok=True)
    path.write_text(document)
    print(path)
    return 0


def cells_of(record: Result) -> dict[str, dict[str, CellPair]]:
    """Return the figures of both systems by cell and key, medians if there are several runs.

    Raises:
        UserError: The result is not one of ``elastic-paced``.
    """
    if record.name.replace("_", "-") != "elastic-paced":
        raise UserError(f"the picture is of elastic-paced, not of {record.name}")

    def median(cell: str, system: str, key: str) -> float:
        return record.figures[f"{cell}.{system}.paced.{key}"].median

    return {
        cell: {
            one.key: CellPair(median(cell, ELASTIC, one.key), median(cell, COLOCATED, one.key))
            for one in FIGURES
        }
        for cell in record.raw["outcomes"]
    }


def limits_of(record: Result, cell: str) -> str:
    """Return the limits of latency of a cell, such as ``2 s and 100 ms``."""
    _, _, _, _, limits, _ = str(record.raw["outcomes"][cell]["load"]).split(", ")
    return limits


def headline(record: Result) -> str:
    """Return the picture as SVG for light and dark pages: cells as rows, figures as columns."""
    import matplotlib
    from matplotlib.figure import Figure

    cells = cells_of(record)
    with matplotlib.rc_context(plots.settings(str(cells))):
        figure = Figure(figsize=(9.6, 0.52 * len(cells) + 1.5), layout="constrained")
        figure.patch.set_facecolor(LIGHT.background)
        columns = figure.subplots(1, len(FIGURES), sharey=True)
        for axes, shown in zip(columns, FIGURES, strict=True):
            _column(axes, shown, {cell: one[shown.key] for cell, one in cells.items()})
        labels = [f"{cell}\n{limits_of(record, cell)}" for cell in cells]
        columns[0].set_yticks(range(len(cells)), labels)
        columns[0].invert_yaxis()
        profiles = ", ".join(sorted({one.profile for one in record.modelled_time}))
        words = (
            "Four instances that follow their load, over four colocated vLLM engines\n"
            f"Real engines, MODELLED time ({profiles}), one run a load; limits of first token "
            "and of each further one below a load's name"
        )
        figure.suptitle(words, fontsize=9.5, x=0.01, ha="left")
        told = f"{words}. {' '.join(sentences(cells))}"
        return plots.document(figure, " ".join(told.split()))


def _column(axes: Any, shown: HeadlineFigure, cells: dict[str, CellPair]) -> None:
    """Draw bars from one to each ratio, with both values; a loss has other colour and hatching."""
    ratios = [one.ratio for one in cells.values()]
    for place, one in enumerate(cells.values()):
        gain = shown.gain(one)
        is_behind = gain < 0
        colour = _BEHIND if is_behind else _AHEAD if gain else _EVEN
        axes.barh(
            place,
            one.ratio - 1,
            left=1,
            height=0.5,
            color=colour,
            hatch="////" if is_behind else None,
            edgecolor=LIGHT.background if is_behind else colour,
            linewidth=0.5,
        )
        ours, theirs = row([one.ours * shown.factor, one.theirs * shown.factor])
        unit = f" {shown.unit}" if shown.unit else ""
        told = f"{one.ratio:.2f}{' ✗' if is_behind else ''}  ({ours} : {theirs}{unit})"
        axes.annotate(
            told,
            (max(1.0, one.ratio), place),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=8,
            fontweight="bold" if is_behind else "normal",
        )
    axes.axvline(1, color=LIGHT.text, linewidth=1)
    better = "more" if shown.is_more_better else "less"
    axes.set_title(f"{shown.words} ({better} is better)", loc="left", fontweight="bold")
    low, high = min(0.95, *ratios), max(1.05, *ratios)
    axes.set_xlim(low - 0.05 * (high - low), high + 1.4 * (high - low))
    axes.set_xticks([])
    axes.tick_params(left=False)
    for side in ("left", "bottom"):
        axes.spines[side].set_visible(False)


def sentences(cells: dict[str, dict[str, CellPair]]) -> list[str]:
    """Return the picture in words, for readers who do not see it; losses by name."""
    found = []
    for shown in FIGURES:
        told = {cell: one[shown.key] for cell, one in cells.items()}
        ratios = [one.ratio for one in told.values()]
        behind = [f"{cell} {one.ratio:.2f}" for cell, one in told.items() if shown.gain(one) < 0]
        ending = f"behind in {', '.join(behind)}" if behind else "behind in none"
        found.append(f"{shown.words}: {min(ratios):.2f} to {max(ratios):.2f} times; {ending}.")
    return found
