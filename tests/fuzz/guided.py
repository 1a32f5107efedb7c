"""Coverage-guided fuzzing of parsers, with the properties that the tests beside this file state.

``guided.py [--seconds N] [--seed N] [TARGET ...]``; needs atheris: ``make fuzz``. Inputs that reach
new code are kept in ``build/fuzz/``, findings in ``corpus/``, where the tests take them up.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

FOLDER = Path(__file__).parent
BUILD = FOLDER.parents[1] / "build" / "fuzz"
FOUND = "found-"
"""Names of findings begin so."""

_RSS_LIMIT_MB = 8 * 1024
_EXECUTED = re.compile(r"^stat::number_of_executed_units: (\d+)$", re.MULTILINE)
_COVERED = re.compile(r"^#\d+\t.* cov: (\d+) ", re.MULTILINE)
_ARTIFACT = re.compile(r"Test unit written to (.+)$", re.MULTILINE)


@dataclass(frozen=True)
class Target:
    """One property of ``tests/fuzz``.

    Attributes:
        corpus: Folder of ``corpus/`` to begin with.
        test: ``MODULE.TEST`` that states it.
    """

    corpus: str
    test: str


TARGETS = {
    "framing": Target("framing", "test_fuzz_framing.test_every_byte_sequence_is_taken_or_refused"),
    "bodies": Target("bodies", "test_fuzz_bodies.test_a_body_is_read_or_refused"),
    "routing": Target("bodies", "test_fuzz_bodies.test_a_balancer_routes_whatever_a_body_says"),
    "records": Target("records", "test_fuzz_records.test_a_page_is_a_header_or_a_record_error"),
    "snapshots": Target(
        "snapshots", "test_fuzz_peers.test_a_snapshot_is_taken_in_or_a_protocol_error"
    ),
    "states": Target("states", "test_fuzz_peers.test_a_state_is_taken_in_or_one_line_in_the_log"),
    "wire": Target(
        "wire", "test_fuzz_wire.test_a_frame_of_the_store_is_a_message_or_a_protocol_error"
    ),
    "answers": Target("guest", "test_fuzz_wire.test_a_guest_s_answer_is_one_or_a_protocol_error"),
    "messages": Target(
        "guest", "test_fuzz_wire.test_a_host_s_message_is_one_or_the_documented_error"
    ),
    "tensors": Target(
        "guest", "test_fuzz_wire.test_tensors_that_did_not_come_are_a_protocol_error"
    ),
}


@dataclass(frozen=True)
class Outcome:
    """What one run has come to.

    Attributes:
        num_inputs: Tried.
        num_edges: Of the code under test, reached by any of them.
        artifact: File with the input that breaks the property; None where none does.
        has_ended: The fuzzer itself has come to its end, rather than failing to start.
    """

    num_inputs: int
    num_edges: int
    artifact: Path | None
    has_ended: bool

    def __str__(self) -> str:
        if not self.has_ended:
            return "it did not run"
        found = f"FOUND {self.artifact}" if self.artifact else "nothing found"
        return f"{self.num_inputs} inputs, {self.num_edges} edges reached, {found}"


def read_outcome(log: str) -> Outcome:
    """Returns what libFuzzer has said in ``log``."""
    executed, covered = _EXECUTED.search(log), _COVERED.findall(log)
    artifact = _ARTIFACT.search(log)
    return Outcome(
        num_inputs=int(executed[1]) if executed else 0,
        num_edges=int(covered[-1]) if covered else 0,
        artifact=Path(artifact[1]) if artifact else None,
        has_ended=executed is not None or artifact is not None,
    )


def check_of(target: Target) -> Callable[[bytes], object]:
    """The property itself, without the strategy that draws its bytes."""
    module, _, name = target.test.partition(".")
    test = getattr(importlib.import_module(module), name)
    inner: Callable[[bytes], object] = test.hypothesis.inner_test
    return inner


def fuzz(name: str, options: Sequence[str]) -> None:
    """Fuzz in this process, which ends with it.

    Args:
        options: As libFuzzer takes them.
    """
    import atheris

    with atheris.instrument_imports(include=["banaserve"]):
        check = check_of(TARGETS[name])
    atheris.Setup([sys.argv[0], *options], check)
    atheris.Fuzz()


def run(name: str, seconds: int, seed: int) -> Outcome:
    """Fuzz in a process of its own; a finding is left in the corpus under the name of its bytes."""
    seeds, kept = FOLDER / "corpus" / TARGETS[name].corpus, BUILD / name
    kept.mkdir(parents=True, exist_ok=True)
    command = [
        *(sys.executable, __file__, "--in-process", name, "--"),
        *(f"-max_total_time={seconds}", f"-seed={seed}", f"-rss_limit_mb={_RSS_LIMIT_MB}"),
        # The properties watch for hangs by themselves, with the same signal.
        *("-timeout=0", "-print_final_stats=1", f"-artifact_prefix={kept}.", "-detect_leaks=0"),
        *(str(kept), str(seeds)),
    ]
    log = BUILD / f"{name}.log"
    with log.open("w") as out:
        subprocess.run(command, stdout=out, stderr=out, check=False)
    outcome = read_outcome(log.read_text(errors="replace"))
    if outcome.artifact is not None:
        return Outcome(outcome.num_inputs, outcome.num_edges, keep(outcome.artifact, seeds), True)
    return outcome


def keep(artifact: Path, corpus: Path) -> Path:
    """Move a finding into ``corpus``; returns its place there, the same for the same bytes."""
    data = artifact.read_bytes()
    kept = corpus / f"{FOUND}{hashlib.sha256(data).hexdigest()[:12]}.bin"
    kept.write_bytes(data)
    artifact.unlink()
    return kept


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("targets", nargs="*", metavar="TARGET", help=f"of {', '.join(TARGETS)}")
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--seed", type=int, default=1)
    return parser


def main(argv: Sequence[str]) -> int:
    """Fuzz the targets that are named, or all; returns 1 where one broke or did not run."""
    parser = _parser()
    options = parser.parse_args(argv)
    if unknown := set(options.targets) - set(TARGETS):
        parser.error(f"no target {' '.join(sorted(unknown))}: there are {', '.join(TARGETS)}")
    are_well = True
    for name in options.targets or TARGETS:
        outcome = run(name, options.seconds, options.seed)
        are_well = are_well and outcome.has_ended and outcome.artifact is None
        print(f"{name}: {outcome}; log {BUILD / name}.log", flush=True)
    return 0 if are_well else 1


if __name__ == "__main__":
    for _name in ("fuzz", "property", "unit"):
        sys.path.append(str(FOLDER.parent / _name))
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    if sys.argv[1:2] == ["--in-process"]:
        fuzz(sys.argv[2], sys.argv[4:])
    else:
        sys.exit(main(sys.argv[1:]))
