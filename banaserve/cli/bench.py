"""``banaserve bench NAME ...``: one sub-command for each question that a benchmark answers."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from banaserve.names import check_known


class Benchmark(NamedTuple):
    """An entry of the list.

    Attributes:
        module: Has ``main(argv) -> int``; imported only when it runs, since some import much.
    """

    module: str
    question: str


BENCHMARKS = {
    "all": Benchmark("banaserve.bench.every", "What do all of them say, in one report?"),
    "cases": Benchmark(
        "banaserve.bench.cases", "Do the simulator's cases reach their goals on paced engines?"
    ),
    "compare": Benchmark(
        "banaserve.bench.compare", "Which system serves the same requests better?"
    ),
    "copies": Benchmark(
        "banaserve.bench.copies", "How near do copies of scattered blocks come to memcpy?"
    ),
    "front": Benchmark("banaserve.bench.front", "What does the front door cost beside vLLM's own?"),
    "handover": Benchmark(
        "banaserve.bench.handover", "What does a request cost that is handed over?"
    ),
    "handover-moved": Benchmark(
        "banaserve.bench.handover_moved",
        "What is handed over where layers of the prefill instance run beside the decode instance?",
    ),
    "short-prompts": Benchmark(
        "banaserve.bench.short_prompts", "From how many tokens on does a prefill leg pay?"
    ),
    "pipeline": Benchmark(
        "banaserve.bench.pipeline", "How much of the store's transfers hides behind computing?"
    ),
    "prefix-ttft": Benchmark(
        "banaserve.bench.prefix_ttft", "Is a cached prefix ever slower than computing it?"
    ),
    "kvstore": Benchmark(
        "banaserve.bench.kvstore", "What does the KV cache store cost beside plain copies?"
    ),
    "migration": Benchmark(
        "banaserve.bench.migration", "What does moving layers and heads take, and bring?"
    ),
    "overlap": Benchmark(
        "banaserve.bench.overlap", "How much faster is it when moved layers run at the same time?"
    ),
    "pacing": Benchmark(
        "banaserve.bench.pacing", "How well do paced engines keep the modelled GPU's time?"
    ),
    "kernels": Benchmark(
        "banaserve.bench.kernels", "How near do the kernels come to the GPU's bandwidth?"
    ),
    "report": Benchmark(
        "banaserve.bench.report", "What do the results in a folder say, as one page?"
    ),
    "serving": Benchmark(
        "banaserve.bench.serving", "What does a server give its users at a given load?"
    ),
    "orchestrator": Benchmark(
        "banaserve.bench.orchestrator", "How long does a decision take, how fast is the simulator?"
    ),
    "router": Benchmark(
        "banaserve.bench.router", "What does a router cost a request and a streamed part?"
    ),
    "stall": Benchmark(
        "banaserve.bench.stall", "Does a very long prompt stall the streams of others?"
    ),
}


def bench_command(argv: Sequence[str]) -> int:
    """Runs the benchmark that ``argv`` begins with on the rest of it; returns its exit code.

    Without a name, or with ``--help`` for one, lists the benchmarks.

    Raises:
        UserError: An unknown name.
    """
    if not argv or argv[0] in ("-h", "--help"):
        Console().print(_listing())
        return 0
    name, *rest = argv
    check_known("benchmark", name, BENCHMARKS)
    exit_code: int = import_module(BENCHMARKS[name].module).main(rest)
    return exit_code


def _listing() -> Table:
    shown = Table(title="banaserve bench NAME [--help]", box=None, title_justify="left")
    shown.add_column("name")
    shown.add_column("question it answers")
    for name, benchmark in sorted(BENCHMARKS.items()):
        shown.add_row(name, benchmark.question)
    return shown
