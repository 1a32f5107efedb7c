"""Plots: sound SVG with every line in it, that repaints itself where the screen is dark."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from banaserve_bench.report.plots import DARK, LIGHT, Plot, PlotGrid, Series, style, svg
from contrasts import contrast

SPACE = "{http://www.w3.org/2000/svg}"


def grid(*series: Series, x_log: bool = False, num_plots: int = 1) -> PlotGrid:
    plots = [Plot(f"T <{n}>", "x", "y", series, x_log=x_log) for n in range(num_plots)]
    return PlotGrid("A & B", plots)


def words(document: str) -> list[str]:
    return [
        "".join(one.itertext()) for one in ElementTree.fromstring(document).iter(f"{SPACE}text")
    ]


def test_lines_their_names_and_their_whiskers() -> None:
    lines = [Series("a", [(1, 0), (2, 10)], [(0, 1), (9, 11)]), Series("b", [(1, 5), (2, 5)])]
    drawn = svg(grid(*lines))
    root = ElementTree.fromstring(drawn)
    assert root.get("aria-label") == "A & B: T <0>"
    assert {"T <0>", "x", "y", "a", "b"} <= set(words(drawn))
    styles = [one.get("style", "") for one in root.iter(f"{SPACE}path")]
    dashes = {
        re.search(r"stroke-dasharray: [^;]*", s)[0]
        for s in styles
        if LIGHT.lines[1] in s and "dasharray" in s
    }
    assert dashes
    assert not any("dasharray" in s for s in styles if LIGHT.lines[0] in s)


def test_plots_stand_beside_each_other_under_one_legend() -> None:
    one, six = (svg(grid(Series("a", [(1, 1)]), num_plots=n)) for n in (1, 6))
    sizes = [
        [float(v) for v in ElementTree.fromstring(d).get("viewBox", "").split()] for d in (one, six)
    ]
    assert sizes[1][2] == pytest.approx(3 * sizes[0][2])
    assert sizes[1][3] < 2.2 * sizes[0][3]
    assert words(six).count("a") == 1


def test_long_names_are_within_the_picture() -> None:
    names = [f"split {n}:2 of 2 GPUs (steps of 2048 tokens)" for n in range(6)]
    drawn = svg(grid(*(Series(name, [(1, 1)]) for name in names), num_plots=2))
    root = ElementTree.fromstring(drawn)
    width = float(root.get("viewBox", "").split()[2])
    starts = {"".join(one.itertext()): one.get("x", "") for one in root.iter(f"{SPACE}text")}
    assert max(float(starts[name]) + 4 * len(name) for name in names) < width


def test_equal_plots_are_equal_and_others_share_no_identifier() -> None:
    one = svg(grid(Series("a", [(1, 1), (2, 2)])))
    assert one == svg(grid(Series("a", [(1, 1), (2, 2)])))
    other = svg(PlotGrid("C", grid(Series("a", [(1, 1), (2, 2)])).plots))
    identifiers = [set(re.findall(r' id="([^"]*)"', drawn)) for drawn in (one, other)]
    assert all(identifiers)
    assert not identifiers[0] & identifiers[1]


@pytest.mark.parametrize(
    "points", [[(1.0, 0.0)], [(0.001, 3.0), (1000.0, 3.0)], [(5.0, -2.0)], [(0.0, 1.0)]]
)
@pytest.mark.parametrize("is_log", [False, True])
def test_any_points_can_be_drawn(points: list[tuple[float, float]], is_log: bool) -> None:
    drawn = svg(grid(Series("a", points), Series("none", []), x_log=is_log))
    assert "nan" not in drawn
    assert "none" not in words(drawn)


@pytest.mark.parametrize("theme", [LIGHT, DARK])
def test_themes_have_contrast(theme: object) -> None:
    assert isinstance(theme, type(LIGHT))
    assert contrast(theme.text, theme.background) >= 7
    assert min(contrast(one, theme.background) for one in theme.lines) >= 4.5


def test_every_colour_that_is_drawn_is_repainted_in_the_dark() -> None:
    lines = [Series(f"s{n}", [(1, n), (2, n)], [(n, n + 1)] * 2) for n in range(len(LIGHT.lines))]
    drawn = svg(grid(*lines))
    body = drawn.replace(f"<style>{style()}</style>", "")
    used = set(re.findall(r"(?:fill|stroke): (#[0-9a-f]{6})", body))
    assert used >= {LIGHT.background, LIGHT.text, *LIGHT.lines}
    for colour in used:
        for what in ("fill", "stroke"):
            assert f'[style*="{what}: {colour}"]' in style()
    assert body != drawn
    # What is black unless it says otherwise could not be read in the dark.
    assert all("fill: " in one for one in re.findall(r"<text[^>]*>", body))
