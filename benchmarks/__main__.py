"""Start of any benchmark by its name: ``python -m benchmarks NAME``, which ``make bench`` runs."""

from __future__ import annotations

import sys

from banaserve.cli.main import one_line_errors
from banaserve_bench.command import run_benchmark
from benchmarks.registry import BENCHMARKS


@one_line_errors
def main(argv: list[str]) -> int:
    """Run the benchmark that ``argv`` begins with; return its exit code."""
    return run_benchmark(argv, BENCHMARKS, "python -m benchmarks")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
