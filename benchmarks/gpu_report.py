"""All measurements of a GPU and the tests that need one, on one page: ``make gpu-report``.

``python -m benchmarks gpu-report``. The tests that need a GPU, the kernels beside its bandwidth,
copies from pinned memory, answers of ``--pd 1:1`` on one GPU beside those of plain vLLM while
modules move, and how much of the store's transfers hides behind computing: within half an hour,
each in a process of its own. A failure or timeout is reported, and the others go on.
"""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from banaserve.arguments import Parser
from banaserve.bench.loadgen.servers import end_on_sigterm, end_with_parent
from banaserve.bench.report.report import write_report
from banaserve.bench.results import result
from banaserve.errors import UserError
from benchmarks.location import ROOT, environment
from benchmarks.run_all import BenchmarkOutcome, run_all
from benchmarks.script import run_script

BUDGET_S = 1800.0
_TESTS_LIMIT_S = 480.0
_NO_TESTS_RAN = 5


def benchmarks_of(size: str) -> Mapping[str, Sequence[str]]:
    """Return the options of each benchmark in the order of the runs, the most wanted ones first.

    Args:
        size: Size of the random weights, as ``benchmarks.random_model`` names it.
    """
    return {
        "served": ("--size", size, "--stream-tokens", "400", "--kv-mib", "2048"),
        "kernels": (),
        "copies": (
            "--runs",
            "3",
        ),
        "pipeline": (
            "--runs",
            "3",
        ),
        "prefix-ttft": (
            "--runs",
            "3",
        ),
    }


def main(argv: Sequence[str]) -> int:
    """Run the benchmarks and write the page; return the exit code, 1 if one failed."""
    parser = Parser(prog="python -m benchmarks gpu-report", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("gpu-report"), help="folder of the page and the results")
    add("--size", default="1b", help="of random weights: 1b or 8b")
    add("--budget", type=float, default=BUDGET_S, metavar="S", help="for all together")
    given = parser.parse_args(list(argv))
    gpu = result.machine().gpu
    if gpu is None:
        raise UserError("no GPU is seen here: `nvidia-smi` has to name one")
    end_on_sigterm()
    until_s = time.monotonic() + given.budget
    print(f"{gpu}: within {given.budget / 60:.0f} minutes, into {given.out}", flush=True)
    outcomes = [run_gpu_tests(given.out)]
    left_s = max(0.0, until_s - time.monotonic())
    outcomes += run_all(benchmarks_of(given.size), given.out, left_s)
    if any(one.is_good for one in outcomes[1:]):
        for page in write_report(given.out, given.out, f"{gpu}: report"):
            print(page)
    for one in outcomes:
        print(f"{one.name}: {one.words}")
    return 0 if all(one.is_good for one in outcomes) else 1


def run_gpu_tests(out: Path) -> BenchmarkOutcome:
    """Run the tests that need a GPU; return their outcome.

    Raises:
        UserError: ``out`` cannot be written.
    """
    log_path = out / "logs" / "gpu-tests.log"
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    print("GPU tests ...", flush=True)
    began_s = time.monotonic()
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu"]
    with log_path.open("wb") as log:
        try:
            code = subprocess.run(
                command,
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=environment(),
                preexec_fn=end_with_parent,
                timeout=_TESTS_LIMIT_S,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            return BenchmarkOutcome("GPU tests", False, f"stopped after {_TESTS_LIMIT_S:.0f} s")
    lines = log_path.read_text(errors="replace").strip().splitlines()[-1:] or ["no words"]
    if code == 0:
        took_s = time.monotonic() - began_s
        return BenchmarkOutcome("GPU tests", True, f"{lines[0].strip('= ')} ({took_s:.0f} s)")
    why = "none ran" if code == _NO_TESTS_RAN else f"exit code {code}"
    return BenchmarkOutcome("GPU tests", False, f"{why}: {lines[0].strip('= ')} (log: {log_path})")


if __name__ == "__main__":
    run_script(main)
