"""``banaserve bench NAME ...``: benchmarks of a server as its clients see it, and reports.

Micro-benchmarks of banaserve's parts are run from a checkout: ``make bench NAME=...``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import NamedTuple

from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve.cli.terminal.console import print_rows


class Benchmark(NamedTuple):
    """Entry of the list of benchmarks.

    Attributes:
        module: Module whose ``main(argv)`` runs the benchmark and returns the exit code; imported
            only then, to save imports.
    """

    module: str
    question: str


SUBCOMMANDS = {
    "compare": Benchmark(
        "banaserve_bench.compare.command", "Which system serves the same requests better?"
    ),
    "report": Benchmark(
        "banaserve_bench.report.report", "What do the results in a folder say, as one page?"
    ),
    "serving": Benchmark(
        "banaserve_bench.serving.command", "What does a server give its users at a given load?"
    ),
}


def bench_command(argv: Sequence[str]) -> int:
    """Run the benchmark that ``argv`` begins with on its other arguments; return the exit code.

    Without a name, or with ``--help`` in its place, list the benchmarks.

    Raises:
        UserError: The name is not known.
    """
    return run_benchmark(argv, SUBCOMMANDS, "banaserve bench")


def run_benchmark(argv: Sequence[str], benchmarks: Mapping[str, Benchmark], program: str) -> int:
    """Run a benchmark like ``bench_command``, from any list; the help names ``program``."""
    if not argv or argv[0] in ("-h", "--help"):
        listed = ((name, benchmark.question) for name, benchmark in sorted(benchmarks.items()))
        print(f"{program} NAME [--help]")
        print_rows([("name", "question it answers"), *listed], {})
        if benchmarks is SUBCOMMANDS:
            print("\nmicro-benchmarks of the parts, from a checkout: make bench NAME=NAME")
        return 0
    name, *rest = argv
    if name not in benchmarks and benchmarks is SUBCOMMANDS:
        raise UserError(
            f"unknown benchmark: {name} (known: {', '.join(SUBCOMMANDS)}); micro-benchmarks are "
            f"run from a checkout: make bench NAME={name}"
        )
    check_known("benchmark", name, benchmarks)
    exit_code: int = import_module(benchmarks[name].module).main(rest)
    return exit_code
