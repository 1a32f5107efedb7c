"""Check whether banaserve would work with another version of vLLM, without installing it.

Usage: python -m banaserve.engine.compat WHEEL_OR_VERSION [--cache FOLDER] [--only-breaks]

Exit status: 0 if everything that banaserve relies on holds, 1 if something breaks, 2 if the wheel
cannot be read or downloaded.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Sequence
from pathlib import Path

from banaserve.base.errors import UserError
from banaserve.base.models.cache import cache_root
from banaserve.engine.compat.checker import Comparison, check
from banaserve.engine.compat.manifest import ENTRIES
from banaserve.engine.compat.sources import Sources, WheelFiles
from banaserve.engine.compat.wheels import wheel_of


def main(argv: Sequence[str] | None = None) -> int:
    """Print which entries hold and which break; return the exit status."""
    given = _parser().parse_args(argv)
    try:
        wheel = wheel_of(given.wheel, given.cache)
        findings = check(ENTRIES, Sources(WheelFiles(wheel)))
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    print(f"{wheel.name}\n")
    if not given.only_breaks:
        print("\n".join(table(findings)))
    print("\n".join(summary(findings)))
    return 1 if any(one.breaks for one in findings) else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m banaserve.engine.compat",
        description="Check whether banaserve would work with another version of vLLM.",
    )
    parser.add_argument("wheel", metavar="WHEEL_OR_VERSION", help="a wheel's path, or as 0.33.0")
    parser.add_argument(
        "--cache",
        type=Path,
        default=cache_root() / "wheels",
        metavar="FOLDER",
        help="keeps downloaded wheels, some 350 MB each (default: %(default)s)",
    )
    parser.add_argument("--only-breaks", action="store_true", help="leave out what holds")
    return parser


def table(findings: Sequence[Comparison]) -> list[str]:
    """Return lines with every entry, grouped by the module of banaserve that uses it."""
    lines = []
    for group, members in itertools.groupby(findings, key=lambda one: one.entry.group):
        lines += [f"{group}.py", *map(_row, members), ""]
    return lines


def _row(finding: Comparison) -> str:
    entry = finding.entry
    state = "BREAKS" if finding.breaks else "ok"
    kind = entry.hook.value or entry.kind.value
    why = finding.breaks or finding.note
    return f"  {state:6}  {kind:11}  {entry.path}" + f"  {why}" * bool(why) + f"  [{entry.purpose}]"


def summary(findings: Sequence[Comparison]) -> list[str]:
    """Return lines with the number of entries that hold, and the entries that break."""
    broken = [one for one in findings if one.breaks]
    num_held = len(findings) - len(broken)
    if not broken:
        return [f"all {num_held} names hold"]
    return [f"{num_held} of {len(findings)} names hold; {len(broken)} break:", *map(_row, broken)]


if __name__ == "__main__":
    sys.exit(main())
