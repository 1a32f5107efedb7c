"""Rules on tests: none counts on time, and each invariant has a test that `make test` runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from docs.repository.findings import ROOT, Finding, nodes_of, sources, too_few, tree_of

_TESTS = ROOT / "tests"
_MAY_SLEEP = (
    "support/waiting.py",
    "mock_engine/mock_core.py",  # its steps take the time that they are told
    "simulation/",  # virtual time
    "plan/modelled_server.py",  # virtual time
    "sim/test_timeline.py",
)
_ARCHITECTURE = ROOT / "ARCHITECTURE.md"
_TEST = re.compile(r"`(tests/[\w/]+\.py):(\w+)`")
_TEST_FILE = re.compile(r"`(tests/[\w/]+\.py)`")


def findings() -> Iterator[Finding]:
    """Yield sleeps of tests, and invariants of ARCHITECTURE whose files `make test` leaves out."""
    for path in sources("tests"):
        if not path.relative_to(_TESTS).as_posix().startswith(_MAY_SLEEP):
            yield from sleep_findings(path)
    yield from invariant_findings(_ARCHITECTURE)


def sleep_findings(path: Path) -> Iterator[Finding]:
    """Yield calls of ``time.sleep`` and ``asyncio.sleep`` that do more than give way."""
    for call in nodes_of(path, ast.Call):
        name = ast.unparse(call.func)
        gives_way = len(call.args) == 1 and ast.unparse(call.args[0]) in ("0", "0.0")
        if name in ("time.sleep", "asyncio.sleep") and not gives_way:
            words = (
                "a test that sleeps counts on time: wait for a condition (tests/support/waiting.py)"
            )
            yield Finding(path, call.lineno, words)


def invariant_findings(architecture: Path) -> Iterator[Finding]:
    """Yield rows of the tables of invariants without a test that `make test` runs.

    Rows of four columns concern engines: the third names one test that is marked ``spine``.
    """
    lines = architecture.read_text().splitlines()
    rows = [
        (number, [cell.strip() for cell in line.strip("|").split("|")])
        for number, line in enumerate(lines, start=1)
        if line.startswith("| ") and "tests/" in line
    ]
    rows = [(number, cells) for number, cells in rows if "`tests/" in cells[2]]
    yield from too_few(architecture, rows, 15, "invariants")
    for number, cells in rows:
        if len(cells) == 4:
            named = _TEST.fullmatch(cells[2])
            if named is None or not is_spine(ROOT / named[1], named[2]):
                words = f"{cells[2]} is no test that is marked spine: `make test` does not run it"
                yield Finding(architecture, number, words)
        elif not any(_always_runs(ROOT / name) for name in _TEST_FILE.findall(cells[2])):
            yield Finding(architecture, number, "no test of this invariant runs in `make test`")


def is_spine(path: Path, name: str) -> bool:
    """Return whether a file has a test of this name that is marked ``spine``, or a case of it."""
    if not path.is_file():
        return False
    tests = [*nodes_of(path, ast.FunctionDef), *nodes_of(path, ast.AsyncFunctionDef)]
    found = [one for one in tests if getattr(one, "name", "") == name]
    marks = [ast.unparse(mark) for test in found for mark in getattr(test, "decorator_list", ())]
    assigned = [ast.unparse(one) for one in tree_of(path).body if isinstance(one, ast.Assign)]
    marks += [one for one in assigned if one.startswith("pytestmark = ")]
    return bool(found) and any("pytest.mark.spine" in mark for mark in marks)


def _always_runs(path: Path) -> bool:
    marks = r"^pytestmark = .*mark\.(e2e|room)"
    return path.is_file() and not re.search(marks, path.read_text(), re.MULTILINE)
