"""Run the lint: ``python -m docs.repository [SUBJECT ...]``, all subjects where none is named.

One line for each finding, ``path:line: words``; the exit code is 1 where there is one.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

SUBJECTS = (
    "layout",
    "words",
    "waits",
    "vllm_names",
    "documents",
    "packages",
    "containers",
    "kubernetes",
    "dashboard",
    "results",
)
"""Modules of this folder with a function ``findings``; imported only when they run."""


def main(argv: Sequence[str]) -> int:
    """Print the findings of the named subjects; return the exit code."""
    unknown = [name for name in argv if name not in SUBJECTS]
    if unknown:
        print(f"there is no subject {unknown[0]}: {', '.join(SUBJECTS)}", file=sys.stderr)
        return 2
    num_findings = 0
    for name in argv or SUBJECTS:
        for finding in import_module(f"docs.repository.{name}").findings():
            print(finding)
            num_findings += 1
    return 1 if num_findings else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
