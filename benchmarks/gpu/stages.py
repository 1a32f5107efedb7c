"""Stages of the GPU report, in the order of their worth, and the time that each of them gets."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum

import msgspec

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
    tests = ("-m", "pytest", "-q", "-p", "no:cacheprovider", "tests/gpu")
    return [
        _stage("environment", ("-m", "benchmarks.gpu.environment"), 90, 1),
        _stage("smoke", smoke, 180, 3),
        _benchmark("served", (*served, *patient), 400, 12),
        _stage("tests", tests, 480, 5),
        _benchmark("kernels", (), 300, 4),
        _benchmark("pipeline", sized, 240, 3),
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
