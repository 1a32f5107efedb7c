"""Every benchmark that needs no data, one by one, and a report.

``python -m benchmarks all``. With ``--quick`` each runs just long enough to give its figures once,
all within ten minutes; the figures then show no more than orders of magnitude. A benchmark that
fails or runs out of time is reported at the end, and the others go on.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from banaserve.base.arguments import Parser
from banaserve.base.errors import UserError
from banaserve.base.names import check_known
from banaserve_bench.loadgen.servers import end_on_sigterm, end_with_parent
from banaserve_bench.report.report import write_report
from benchmarks.location import ROOT, environment

QUICK_BUDGET_S = 600.0
_GRACE_S = 20.0
QUICK: Mapping[str, tuple[str, ...]] = {
    "kvstore": ("--runs", "1", "--repeats", "3", "--blocks", "8", "--disk-blocks", "16"),
    "copies": ("--runs", "1", "--repeats", "3", "--disk-blocks", "16"),
    "orchestrator": ("--runs", "1", "--requests", "20000", "--instances", "64"),
    "pipeline": ("--runs", "1", "--blocks", "3", "--cached-blocks", "2"),
    "router": ("--runs", "1", "--requests", "500", "--streams", "32", "--insertions", "300000"),
    "migration": (
        *("--runs", "1", "--contexts", "200", "--cases", "layers_1", "heads_1"),
        *("--batch-requests", "0"),
    ),
    "handover": (
        *("--runs", "1", "--requests", "3", "--concurrency", "2", "--max-tokens", "400"),
        *("--output-tokens", "16"),
    ),
    "handover-moved": ("--runs", "1", "--requests", "1", "--prompt-tokens", "400"),
    "pacing": ("--dilations", "2", "--requests", "16"),
    "front": ("--runs", "1", "--streams", "1,64", "--system", "colocated"),
    "prefix-ttft": ("--runs", "1", "--prompt-tokens", "768", "--link-blocks", "3"),
    "stall": ("--runs", "1", "--streams", "4", "--prompt-tokens", "8000"),
    "short-prompts": ("--runs", "1"),
    "recovery": ("--quick",),
    "overlap": (
        *("--runs", "1", "--layers", "15", "--requests", "1", "--prompt-tokens", "1000"),
        *("--long-prompt-tokens", "2000", "--output-tokens", "8", "--batches", "1"),
        *("--no-stages", "--shares"),
    ),
}
"""Options of each benchmark for ``--quick``; cheap ones first, so a slow machine runs most."""


class BenchmarkOutcome(NamedTuple):
    """Outcome of one benchmark, and the words that report it."""

    name: str
    is_good: bool
    words: str


def main(argv: Sequence[str]) -> int:
    """Run the benchmarks and write the report; return the exit code, 1 if one failed."""
    parser = Parser(prog="python -m benchmarks all", description=__doc__)
    parser.add_argument("--quick", action="store_true", help="within ten minutes")
    parser.add_argument("--out", type=Path, default=Path("bench-all"), help="folder of results")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="repeat")
    parser.add_argument("--budget", type=float, metavar="S", help="for all together")
    given = parser.parse_args(list(argv))
    end_on_sigterm()
    for name in given.only:
        check_known("benchmark", name, QUICK)
    chosen = {
        name: options if given.quick else ()
        for name, options in QUICK.items()
        if not given.only or name in given.only
    }
    budget_s = given.budget or (QUICK_BUDGET_S if given.quick else float("inf"))
    outcomes = run_all(chosen, given.out, budget_s)
    if any(one.is_good for one in outcomes):
        for page in write_report(given.out, given.out, "All benchmarks"):
            print(page)
    for one in outcomes:
        print(f"{one.name}: {one.words}")
    return 0 if all(one.is_good for one in outcomes) else 1


def run_all(
    benchmarks: Mapping[str, Sequence[str]], out: Path, budget_s: float
) -> list[BenchmarkOutcome]:
    """Run each benchmark in its own process until the budget is spent; return the outcomes.

    Raises:
        UserError: ``out`` cannot be written.
    """
    try:
        (out / "logs").mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    until_s = time.monotonic() + budget_s
    outcomes = []
    for name, options in benchmarks.items():
        left_s = until_s - time.monotonic() - _GRACE_S
        if left_s <= 0:
            outcomes.append(BenchmarkOutcome(name, False, "not run: no time left"))
            continue
        print(f"{name} ...", flush=True)
        outcomes.append(_run(name, options, out, left_s))
    return outcomes


def _run(name: str, options: Sequence[str], out: Path, limit_s: float) -> BenchmarkOutcome:
    command = [sys.executable, "-m", "benchmarks", name, *options]
    command += ["--json", str((out / f"{name}.json").resolve())]
    log_path = out / "logs" / f"{name}.log"
    began_s = time.monotonic()
    code = run_logged(command, log_path, limit_s)
    took_s = time.monotonic() - began_s
    if code is None:
        return BenchmarkOutcome(name, False, f"stopped after {limit_s:.0f} s: no time left")
    if code == 0:
        return BenchmarkOutcome(name, True, f"{took_s:.0f} s")
    last = log_path.read_text(errors="replace").strip().splitlines()[-1:] or ["no words"]
    return BenchmarkOutcome(name, False, f"exit code {code}: {last[0]} (log: {log_path})")


def run_logged(
    command: Sequence[str],
    log_path: Path,
    limit_s: float,
    variables: Mapping[str, str] | None = None,
) -> int | None:
    """Run a command that imports ``benchmarks``, with its output in a log.

    Args:
        limit_s: Time after which it and its children are ended, in seconds.
        variables: Environment variables beside those of this process.

    Returns:
        The exit code; None if the command was ended.
    """
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**environment(), **(variables or {})},
            preexec_fn=end_with_parent,
        )
        try:
            return process.wait(None if limit_s == float("inf") else limit_s)
        except subprocess.TimeoutExpired:
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to end its servers and itself; then kill what is left of its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    if process.poll() is None:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
