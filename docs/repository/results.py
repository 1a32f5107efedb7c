"""Committed results: each is one, and README shows its figures and a picture of them."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree
from collections.abc import Collection, Iterator
from pathlib import Path

from banaserve.base.errors import UserError
from banaserve_bench.results import result
from benchmarks import pictures, results_page
from docs.repository.findings import ROOT, Finding, at

RESULTS = results_page.RESULTS
README = ROOT / "README.md"
QUOTED = (
    ("prefix-ttft", "ttft_90_memory", "{:.2f} s"),
    ("prefix-ttft", "ttft_recompute", "{:.1f} s"),
    ("migration", "layers_10.1000.stall", "{:.1f} ms"),
    ("migration", "stop_and_copy_10.1000.stall", "{:.1f} ms"),
    ("recovery", "pause.2000", "{:.2f} s"),
    ("recovery", "pause_recompute.2000", "{:.1f} s"),
    ("elastic-cpu", "shared-prefixes.requests_ratio.prefix-affinity", "{:.2f}"),
    ("elastic-cpu", "chats.requests_ratio.prefix-affinity", "{:.2f} times"),
    ("elastic-code", "code-llama.elastic.paced.goodput", "{:.0%}"),
    ("elastic-code", "code-llama.colocated.paced.goodput", "{:.0%}"),
)
"""Figures that README's table shows, with their form there: result, figure, form."""
STALE_WORDS = "the measured code has changed since"
MIN_WORDS = 6
_SPACE = "{http://www.w3.org/2000/svg}"


def findings() -> Iterator[Finding]:
    """Yield files that are no results, and figures and pictures of README that are of others."""
    try:
        stale = results_page.stale_results(RESULTS)
        results_page.page(RESULTS, stale)
    except UserError as error:
        yield Finding(RESULTS, 1, str(error))
    else:
        yield from quoted_findings(README.read_text(), stale)
    yield from _pictures()


def quoted_findings(readme: str, stale: Collection[Path] | None) -> Iterator[Finding]:
    """Yield figures of README that its results do not have, and results that it calls too young.

    Args:
        stale: Stale results; None if they are unknown.
    """
    for name, key, form in QUOTED:
        record = result.read(RESULTS / f"{name}.json")
        shown = form.format(record.figures[key].median)
        command = f"make bench NAME={record.name}"
        rows = [line for line in readme.splitlines() if command in line]
        if not any(re.search(rf"(?<![\d.]){re.escape(shown)}", line) for line in rows):
            yield at(README, command, f"{key} of {name} is {shown}")
    if stale is None:
        return
    changed = sorted({name for name, _, _ in QUOTED if Path(f"{name}.json") in stale})
    if bool(changed) != (STALE_WORDS in readme):
        told = f"the code of {', '.join(changed)} has changed" if changed else "no code has changed"
        yield at(README, "## Five figures", f"{told}: say so, or not, as '{STALE_WORDS}'")


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
