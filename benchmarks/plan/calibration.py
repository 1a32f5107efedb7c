"""Constants of real engines, fitted on some runs, with the error that they have on runs left out.

Software and kernels have errors of their own: a family is the runs of one stack, version, kind of
system and kind of parallelism. A family with too few fitted runs is fitted together with those of
other versions. Which constants a family has is decided by the error on runs left out one by one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import cache
from typing import NamedTuple

import numpy as np

from banaserve_bench.plan.search.trial import StepError
from banaserve_bench.silicon.costs import EngineConstants
from banaserve_bench.silicon.description import ErrorSection
from benchmarks.closed_loop import LAUNCHES, ClosedLoop, LoopEngines, RunConstants, Simulated
from benchmarks.plan.engines import STEP_TOKENS, engine_of
from benchmarks.plan.runs import EngineGroup, ServedRun
from benchmarks.silicon import Floats
from benchmarks.whole_runs import KnownEngine, nearest

LEAST_RUNS = 3
"""Fitted runs of a family, at least."""
_MOST_CLIENTS = 640
"""Clients of a fitted run, at most: others take minutes."""
_ROUNDS = 2
_COLUMNS: Sequence[Sequence[int]] = ((0, 1), (0, 1, 2), (0, 1, 2, 3))
"""Constants that a family may have: factors of GPU time, also of a step, also of a request."""
_LEAST_FACTOR = 0.1
_PROMPT_FACTORS = tuple(0.5 * 1.4**n for n in range(5))
_START = RunConstants(way_s=0.03)


class Family(NamedTuple):
    """Runs that have constants in common."""

    stack: tuple[str, ...]
    is_split: bool
    kind: str
    version: str | None = None

    @classmethod
    def all_of(cls, run: ServedRun) -> Sequence[Family]:
        """Return the families of ``run``, the closest first."""
        wide = cls(run.stack, run.is_split, run.engines.shape.kind)
        return wide._replace(version=run.version), wide


class Calibrated(NamedTuple):
    """Constants of a family, and the advisor's error of them, by runs left out one by one."""

    constants: RunConstants
    error: StepError


def calibrated(run: ServedRun, fitted: Sequence[ServedRun]) -> Calibrated | None:
    """Return the constants for ``run`` by ``fitted`` runs; None if too few are of its family."""
    for family in Family.all_of(run):
        own = tuple(
            one for one in fitted if one.clients <= _MOST_CLIENTS and family in Family.all_of(one)
        )
        if len(own) >= LEAST_RUNS:
            return _calibrated(own)
    return None


def simulated(run: ServedRun, constants: RunConstants, slowdown: float = 1.0) -> Simulated:
    """Return the means of ``run`` on simulated engines, which the package must know."""
    engine = engine_of(run, run.engines.shape)
    prefill = engine_of(run, run.prefill.shape) if run.prefill else None
    assert engine is not None
    return served(run, engine, prefill, constants, slowdown)


def served(
    run: ServedRun,
    engine: KnownEngine,
    prefill: KnownEngine | None,
    constants: RunConstants,
    slowdown: float = 1.0,
) -> Simulated:
    """Return the means of ``run`` on these engines; None as ``prefill`` if all do both."""
    lengths = run.prompt_tokens, run.output_tokens
    prompts = None if run.prefill is None or prefill is None else _engines(run.prefill, prefill)
    engines = _engines(run.engines, engine)
    return ClosedLoop(run.clients, lengths, engines, prompts, constants, slowdown).run()


def _engines(workers: EngineGroup, known: KnownEngine) -> LoopEngines:
    groups = workers.shape.data_parallel
    kv_tokens, step_tokens = groups * known.kv_tokens, groups * STEP_TOKENS
    return LoopEngines(workers.number, known.times, kv_tokens, step_tokens)


@cache
def _calibrated(runs: tuple[ServedRun, ...]) -> Calibrated:
    tpot_s, ttft_s = (np.array([getattr(run, key) for run in runs]) for key in ("tpot_s", "ttft_s"))
    known = _START
    for _ in range(_ROUNDS):
        parts = np.array([simulated(run, known).parts[:LAUNCHES] for run in runs])
        factors, of_tpot = _nearest_left_out(parts, tpot_s)
        known = known._replace(engine=_engine(factors, has_prompts=bool(parts[:, 1].any())))
    lengths = np.array([run.prompt_tokens for run in runs], dtype=float)
    ways = np.stack([np.ones(len(runs)), lengths], axis=1)
    tried = []
    for factor in _PROMPT_FACTORS if runs[0].is_split else (1.0,):
        prefill = replace(known.engine, prompt_factor=factor, host_request_s=0.0)
        one = known._replace(prefill=prefill)
        rest_s = ttft_s - [simulated(run, one).ttft_s - known.way_s for run in runs]
        way = nearest(ways, rest_s, ttft_s)
        wrong = np.abs(ways @ np.array(way) - rest_s) / ttft_s
        tried.append((float(wrong.sum()), factor, one, way, wrong))
    _, _, known, way, wrong = min(tried, key=lambda one: one[:2])
    known = known._replace(way_s=way[0], way_token_s=way[1])
    of_step = float(of_tpot.mean())
    error = ErrorSection(float(wrong.mean()), of_step, latency=of_step)
    return Calibrated(known, StepError.of(error))


def _engine(factors: Sequence[float], has_prompts: bool) -> EngineConstants:
    decode, prompt, host_s, request_s = factors
    of_prompts = max(_LEAST_FACTOR, prompt) if has_prompts else 1.0
    return EngineConstants(host_s, request_s, max(_LEAST_FACTOR, decode), of_prompts)


def _nearest_left_out(parts: Floats, tpot_s: Floats) -> tuple[list[float], Floats]:
    """Return the factors of parts that predict runs left out best, and those errors."""
    tried = []
    for columns in _COLUMNS:
        wrong = np.array(
            [_left_out(parts[:, columns], tpot_s, place) for place in range(len(parts))]
        )
        tried.append((float(wrong.mean()), columns, wrong))
    _, columns, wrong = min(tried, key=lambda one: one[:2])
    factors = np.zeros(parts.shape[1])
    factors[list(columns)] = nearest(parts[:, columns], tpot_s)
    return factors.tolist(), wrong


def _left_out(columns: Floats, values: Floats, place: int) -> float:
    rest = np.arange(len(values)) != place
    found = nearest(columns[rest], values[rest])
    return abs(float(columns[place] @ np.array(found)) / values[place] - 1)
