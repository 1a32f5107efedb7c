"""Committed results: each is one, and the pages and pictures made of them are those of today."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from banaserve.bench.report.report import markdown_without_drawing
from banaserve.bench.results import result
from banaserve.errors import UserError
from benchmarks import pictures, results_page
from benchmarks.break_even import page as break_even
from docs.repository.findings import ROOT, Finding, at, too_few

RESULTS = results_page.RESULTS
README = ROOT / "README.md"
COMPARED_TITLE = "Systems side by side"
MAX_BYTES = 300_000
MIN_WORDS = 6
_SPACE = "{http://www.w3.org/2000/svg}"


def findings() -> Iterator[Finding]:
    """Yield files that are no results, pages that are stale, and pictures of other figures."""
    paths = sorted(RESULTS.rglob("*.json"))
    yield from too_few(RESULTS, paths, 20, "results")
    for path in paths:
        yield from result_findings(path)
    text = results_page.page(RESULTS, results_page.stale_results(RESULTS))
    if problem := results_page.stale(text, results_page.PAGE):
        yield Finding(results_page.PAGE, 1, problem)
    if break_even.PAGE.read_text() != break_even.page(break_even.RESULT):
        yield Finding(break_even.PAGE, 1, f"is stale: run {break_even.COMMAND}")
    for folder in sorted(RESULTS.glob("compare-*/")):
        if (folder / "report.md").read_text() != markdown_without_drawing(folder, COMPARED_TITLE):
            again = f"banaserve bench report {folder.relative_to(ROOT)} --title '{COMPARED_TITLE}'"
            yield Finding(folder / "report.md", 1, f"is stale: run {again}")
    yield from _pictures()


def result_findings(path: Path) -> Iterator[Finding]:
    """Yield why a file is no result."""
    try:
        if not result.read(path).figures:
            yield Finding(path, 1, "has no figures")
    except UserError as error:
        yield Finding(path, 1, str(error))


def words_of(picture: str) -> list[str]:
    """Return the texts of an SVG document."""
    found = ElementTree.fromstring(picture).iter(f"{_SPACE}text")
    return ["".join(one.itertext()) for one in found]


def _pictures() -> Iterator[Finding]:
    committed = pictures.FOLDER / pictures.NAME
    drawn = pictures.headline(result.read(pictures.SOURCE))
    if words_of(committed.read_text()) != words_of(drawn):
        yield Finding(committed, 1, f"is of other figures: run {pictures.COMMAND}")
    shown = re.findall(r"!\[([^\]]+)\]\((docs/pictures/[^)]+)\)", README.read_text())
    names = {Path(path).name for _, path in shown}
    for name in sorted(names ^ {one.name for one in pictures.FOLDER.iterdir()}):
        yield at(README, name, f"{name} is not both shown and in docs/pictures")
    for words, path in shown:
        if len(words.split()) < MIN_WORDS:
            yield at(README, path, "the picture has no words for those who do not see it")
        if (ROOT / path).is_file() and (ROOT / path).stat().st_size >= MAX_BYTES:
            yield at(README, path, f"{path} has more than {MAX_BYTES:,} bytes")
