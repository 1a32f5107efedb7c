"""Rules on tests: none counts on time, and each invariant has a test that `make test` runs."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

from docs.repository.findings import ROOT, Finding, nodes_of, sources, too_few

_TESTS = ROOT / "tests"
_MAY_SLEEP = (
    "support/waiting.py",
    "mock_engine/mock_core.py",  # its steps take the time that they are told
    "simulation/",  # virtual time
    "sim/test_timeline.py",
)
_ARCHITECTURE = ROOT / "ARCHITECTURE.md"
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
    """Yield rows of the table of invariants none of whose files has a test that always runs."""
    lines = architecture.read_text().splitlines()
    rows = [
        (number, line)
        for number, line in enumerate(lines, start=1)
        if line.startswith("| ") and "tests/" in line.rpartition(" | ")[2]
    ]
    yield from too_few(architecture, rows, 15, "invariants")
    for number, line in rows:
        files = [ROOT / name for name in _TEST_FILE.findall(line)]
        if not any(_always_runs(path) for path in files if path.is_file()):
            yield Finding(architecture, number, "no test of this invariant runs in `make test`")


def _always_runs(path: Path) -> bool:
    text = path.read_text()
    is_left_out = re.search(r"^pytestmark = .*mark\.(e2e|room)", text, re.MULTILINE)
    return "mark.spine" in text or not is_left_out
