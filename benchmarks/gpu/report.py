"""All measurements of a GPU and the tests that need one, in one table: ``make gpu-report``.

``python -m benchmarks gpu-report``. Whether the libraries load, plain vLLM beside transformers,
answers of ``--pd 1:1`` on one GPU beside those of plain vLLM while modules move, the tests that
need a GPU, the kernels beside its bandwidth, and how much of the store's transfers hides behind
computing: each in a process of its own, with its share of the time. A further call runs what the
last one has not run, then what failed.
"""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path

import msgspec
import psutil

from banaserve.base.arguments import Parser
from banaserve.base.errors import UserError
from banaserve.base.text.names import check_known
from banaserve_bench.loadgen.servers import LOGS_VARIABLE, end_on_sigterm, end_with_parent
from banaserve_bench.report.report import write_report
from benchmarks.gpu import device
from benchmarks.gpu.kit_files import KIT, Kit
from benchmarks.location import ROOT, environment
from benchmarks.random_model import SIZES

BUDGET_S = 1800.0
_QUICK_BUDGET_S = 300.0
_STATE_FILE = "stages.json"
_RESULTS = "results"
_GRACE_S = 20.0
_KEEP_S = 20.0
"""Time after which the archive is written anew, in seconds: the machine may end at any moment."""
_ARCHIVE = "gpu-report.tar.gz"
_LOGGED = re.compile(r"\b(INFO|WARNING|[Ww]arning)\b|^\[rank\d+\]:\[")
LEAST_S = 15.0
"""Time below which no stage is begun: imports alone take as long."""


@dataclass(frozen=True, slots=True)
class Stage:
    """One process of the report.

    Attributes:
        limit_s: Most time that it may take, in seconds, however much is left.
        weight: Share of the time left that it may take, relative to the stages that wait behind it.
        benchmark: True if it takes ``--json`` and writes a result.
    """

    name: str
    command: tuple[str, ...]
    limit_s: float
    weight: float
    benchmark: bool = False


class StageState(StrEnum):
    """End of a stage."""

    OK = "ok"
    FAILED = "failed"
    STOPPED = "stopped"
    NOT_RUN = "not run"


class StageOutcome(msgspec.Struct, frozen=True):
    """End of a stage, and the words that report it."""

    name: str
    state: StageState
    took_s: float = 0.0
    words: str = ""


def stages_of(size: str, *, quick: bool) -> list[Stage]:
    """Return the stages, the most wanted ones first.

    Args:
        size: Size of the random weights, as ``benchmarks.random_model`` names it.
        quick: True for the least that shows something.
    """
    smoke = ("-m", "benchmarks.gpu.smoke", "--size", size)
    runs = ("--runs", "1" if quick else "3")
    sized = ("--size", size, *runs)  # the kit has no weights
    streams = ("--prompts", "2", "--stream-tokens", "60") if quick else ("--stream-tokens", "400")
    served = ("--size", size, *streams, "--kv-mib", "1024" if quick else "2048")
    # Kernels that were not compiled yet are, in the first step of a guest.
    patient = ("--migration-stall", "30")
    names = sorted(path.name for path in (ROOT / "tests" / "gpu").glob("test_*.py"))
    names.sort(key=lambda name: "kernels" in name)  # many, each of which is compiled first
    files = [f"tests/gpu/{name}" for name in names]
    tests = ("-m", "pytest", "-v", "-p", "no:cacheprovider", *files)
    # Of 16 tokens each: with six of them, launches would take all the time.
    blocks = ("--blocks", "60", "--cached-blocks", "40")
    return [
        _stage("environment", ("-m", "benchmarks.gpu.environment"), 90, 1),
        _stage("smoke", smoke, 180, 3),
        _benchmark("served", (*served, *patient), 400, 12),
        _stage("tests", tests, 480, 5),
        _benchmark("kernels", (), 300, 4),
        _benchmark("pipeline", (*sized, *blocks), 240, 3),
        _stage("smoke-graphs", (*smoke, "--graphs"), 180, 3),
        _benchmark("prefix-ttft", sized, 300, 3),
    ]


def _stage(name: str, words: tuple[str, ...], limit_s: float, weight: float) -> Stage:
    return Stage(name, (sys.executable, *words), limit_s, weight)


def _benchmark(name: str, options: tuple[str, ...], limit_s: float, weight: float) -> Stage:
    command = (sys.executable, "-m", "benchmarks", name, *options)
    return Stage(name, command, limit_s, weight, benchmark=True)


def still_to_run(stages: Sequence[Stage], ended: Mapping[str, StageOutcome]) -> list[Stage]:
    """Return the stages that an earlier call has not run, then those that did not end well."""

    def place(stage: Stage) -> int:
        outcome = ended.get(stage.name)
        if outcome is None or outcome.state is StageState.NOT_RUN:
            return 0
        return {StageState.STOPPED: 1, StageState.FAILED: 2, StageState.OK: 3}[outcome.state]

    return [stage for stage in sorted(stages, key=place) if place(stage) < 3]


def limit_s(stage: Stage, behind: Iterable[Stage], left_s: float) -> float:
    """Return the time that a stage may take, in seconds; 0 if it should not begin.

    Time that a stage leaves unused is shared by those behind it.

    Args:
        behind: Stages that follow it.
        left_s: Time left for it and for them.
    """
    if left_s < LEAST_S:
        return 0.0
    share = stage.weight / (stage.weight + sum(other.weight for other in behind))
    return min(stage.limit_s, max(LEAST_S, share * left_s))


def main(argv: Sequence[str]) -> int:
    """Run the stages and write the table; return the exit code, 1 if one did not end well."""
    parser = Parser(prog="python -m benchmarks gpu-report", description=__doc__)
    add = parser.add_argument
    add("--out", type=Path, default=Path("gpu-report"), help="folder of table, results and logs")
    add("--size", choices=sorted(SIZES), help="of random weights; 1b without it")
    add("--budget", type=float, metavar="S", help="for all together")
    add("--only", action="append", default=[], metavar="STAGE", help="run it anew; repeat")
    add("--quick", action="store_true", help="the least that shows something, with small weights")
    given = parser.parse_args(list(argv))
    size = given.size or ("tiny" if given.quick else "1b")
    known = stages_of(size, quick=given.quick)
    budget_s = given.budget or (_QUICK_BUDGET_S if given.quick else BUDGET_S)
    until_s = time.monotonic() + budget_s
    for name in given.only:
        check_known("stage", name, [stage.name for stage in known])
    kit = Kit.read(ROOT / KIT) if (ROOT / KIT).is_dir() else None
    facts = device.read_facts()
    device.check(facts, size, kit.gpus if kit else ())
    end_on_sigterm()
    ended = _read(given.out)
    chosen = [stage for stage in known if stage.name in given.only] or still_to_run(known, ended)
    print(f"{facts.words}: within {budget_s:.0f} s, into {given.out}", flush=True)

    def keep() -> None:
        with contextlib.suppress(OSError):  # files of servers come and go
            _keep(given.out, [facts.words, *table(known, ended)])

    try:
        _run_all(chosen, given.out, until_s, ended, keep)
    finally:
        _deliver(given.out, facts, known, ended)
    return 0 if all(_state(ended, one.name) is StageState.OK for one in (chosen or known)) else 1


def _run_all(
    chosen: Sequence[Stage],
    out: Path,
    until_s: float,
    ended: dict[str, StageOutcome],
    keep: Callable[[], None],
) -> None:
    """Run the stages one after the other; note each end in ``ended`` and in the folder."""
    for place, stage in enumerate(chosen):
        left_s = until_s - _GRACE_S - time.monotonic()
        allowed_s = limit_s(stage, chosen[place + 1 :], left_s)
        if not allowed_s:
            print(f"{stage.name}: no time left", flush=True)
            ended.setdefault(
                stage.name, StageOutcome(stage.name, StageState.NOT_RUN, words="no time left")
            )
            continue
        print(f"{stage.name} (at most {allowed_s:.0f} s) ...", flush=True)
        ended[stage.name] = outcome = run_stage(stage, out, allowed_s, keep)
        print(f"  {outcome.state} after {outcome.took_s:.0f} s: {outcome.words}", flush=True)
        part = out / f"{_STATE_FILE}.part"
        part.write_bytes(msgspec.json.encode(list(ended.values())))
        part.replace(out / _STATE_FILE)
        keep()


def run_stage(stage: Stage, out: Path, allowed_s: float, keep: Callable[[], None]) -> StageOutcome:
    """Run a stage with its output in a log of its own; return how it ended.

    Args:
        keep: Function called now and then meanwhile.

    Raises:
        UserError: ``out`` cannot be written.
    """
    log_path = out / "logs" / f"{stage.name}.log"
    try:
        log_path.parent.mkdir(parents=True, exist_ok=True)
        (out / _RESULTS).mkdir(exist_ok=True)
    except OSError as error:
        raise UserError(f"cannot write {out}: {error.strerror}") from error
    place = (out / _RESULTS / f"{stage.name}.json").resolve()
    result = ("--json", str(place)) if stage.benchmark else ()
    kept = {LOGS_VARIABLE: str((out / "logs" / f"servers-{stage.name}").resolve())}
    began_s = time.monotonic()
    code = _run_logged((*stage.command, *result), log_path, allowed_s, kept, keep)
    took_s = time.monotonic() - began_s
    words = _last_line(log_path)
    if code is None:
        return StageOutcome(stage.name, StageState.STOPPED, took_s, f"at its limit: {words}")
    if code:
        return StageOutcome(stage.name, StageState.FAILED, took_s, f"exit code {code}: {words}")
    return StageOutcome(stage.name, StageState.OK, took_s, words)


def _run_logged(
    command: Sequence[str],
    log_path: Path,
    limit_s: float,
    variables: Mapping[str, str],
    keep: Callable[[], None],
) -> int | None:
    """Run a command with its output in a log; return its exit code, None if it was ended.

    After ``limit_s`` seconds the command and its children are ended.
    """
    with log_path.open("wb") as log:
        process = subprocess.Popen(
            command,
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            start_new_session=True,
            env={**environment(), **variables},
            preexec_fn=end_with_parent,
        )
        until_s = time.monotonic() + limit_s
        try:
            while (left_s := until_s - time.monotonic()) > 0:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    return process.wait(min(left_s, _KEEP_S))
                keep()
            return None
        finally:
            _end(process)


def _end(process: subprocess.Popen[bytes]) -> None:
    """Ask the process to end its servers and itself; then kill what is left of its session."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(_GRACE_S)
    for pid in psutil.pids():  # servers have groups of their own, and would keep the GPU's memory
        with contextlib.suppress(ProcessLookupError):
            if os.getsid(pid) == process.pid:
                os.kill(pid, signal.SIGKILL)
    process.wait()


def _last_line(log_path: Path) -> str:
    """Return the last line that is no log of vLLM or torch, whose last words are warnings."""
    lines = [one.strip("= \t") for one in log_path.read_text(errors="replace").splitlines()]
    told = [line for line in lines if line and not _LOGGED.search(line)]
    return told[-1][:160] if told else "it said nothing"


def _deliver(
    out: Path, facts: device.DeviceFacts, known: Sequence[Stage], ended: Mapping[str, StageOutcome]
) -> None:
    """Write the page of results, the table and the archive of everything; print the table."""
    if not out.is_dir():
        return
    lines = [facts.words, *table(known, ended)]
    if any(stage.benchmark and _state(ended, stage.name) is StageState.OK for stage in known):
        try:
            write_report(out / _RESULTS, out, f"{facts.gpu}: report")
        except UserError as error:  # the archive is wanted all the more
            lines.append(f"no page of results: {error}")
    if os.environ.get(device.NULL_GPU):
        lines.append("this GPU computes nothing: only that the programs run is shown")
    print(f"\n{_keep(out, lines)}{out / _ARCHIVE} holds all results and logs", flush=True)


def _keep(out: Path, lines: Sequence[str]) -> str:
    """Write the table and the archive of everything so far; return the table."""
    text = "\n".join(lines) + "\n"
    (out / "table.txt").write_text(text)
    part = out / f"{_ARCHIVE}.part"
    with tarfile.open(part, "w:gz") as archive:
        for path in sorted(out.iterdir()):
            if not path.name.startswith(_ARCHIVE):
                archive.add(path, path.name)
    part.replace(out / _ARCHIVE)
    return text


def table(known: Sequence[Stage], ended: Mapping[str, StageOutcome]) -> list[str]:
    """Return a line for each stage: its name, its end, seconds, and its last words."""
    rows = [ended.get(stage.name, StageOutcome(stage.name, StageState.NOT_RUN)) for stage in known]
    return [f"{one.name:<13} {one.state:<8} {one.took_s:5.0f} s  {one.words}" for one in rows]


def _state(ended: Mapping[str, StageOutcome], name: str) -> StageState:
    return ended[name].state if name in ended else StageState.NOT_RUN


def _read(out: Path) -> dict[str, StageOutcome]:
    """Return the outcomes of earlier calls by the name of the stage.

    Raises:
        UserError: They cannot be read.
    """
    try:
        said = (out / _STATE_FILE).read_bytes()
    except FileNotFoundError:
        return {}
    try:
        return {one.name: one for one in msgspec.json.decode(said, type=list[StageOutcome])}
    except msgspec.DecodeError as error:
        raise UserError(f"{out / _STATE_FILE}: {error}: remove it, and all stages run") from error
