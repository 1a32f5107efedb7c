"""Whole runs of vLLM in aiconfigurator-core, simulated with the operators of the same package.

    python -m benchmarks silicon-runs [--model WORD] [--json FILE]

A run is a closed loop: each client sends its next request when its last one has ended, ten on
average, with lengths between 0.8 and 1 of the largest, as InferenceX does. Its figures are means
of TTFT and TPOT that the clients measured. Runs of one model, GPU, precision and version of vLLM
are a group, with constants of its own: five of the engine (``EngineConstants``) and two of a
request's way from its client to the engine. They are fitted on configurations whose hash is even;
errors are of the others. The package gives one configuration several ids, so that a hash of ids
would put a run on both sides. Left out are runs that repeat another one's figures, engines of
several data-parallel groups, engines without operators or even runs, and groups with fewer than
six even ones.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any, NamedTuple

import numpy as np
from rich.console import Console
from rich.table import Table

from banaserve.base.errors import UserError
from banaserve_bench.silicon.aiconfigurator import AiconfiguratorTimes
from banaserve_bench.silicon.costs import EngineConstants
from banaserve_bench.silicon.linear import Floats, least_squares
from banaserve_bench.silicon.modelled_engine import package_systems
from banaserve_bench.silicon.step_times import GpuStepTimes
from benchmarks.closed_loop import LAUNCHES, ClosedLoop, LoopEngines, RunConstants, Simulated
from benchmarks.measurement import Measurement, Samples, parser_of
from benchmarks.silicon import is_fitted

_STEP_TOKENS = 8192
_MEMORY_FRACTION = 0.9
_WITHOUT_ASYNC = "0.12.0"
"""Version whose runs plan one step at a time."""
LEAST_RUNS = 6
"""Runs that the constants are fitted on, at least."""
LEAST_FACTOR = 0.01
_FITS = 4
_LAUNCHES_S = (0.0, 0.03, 0.06, 0.09, 0.12)
"""Times ``launch_s`` that are tried, in seconds, until the errors are far greater."""
_CLEARLY, _FAR = 0.98, 1.05
"""Factors of the least error: with a ``launch_s`` that is taken, and where the search ends."""
_TPOT_WEIGHT = 5
"""Errors of TPOT are to be a fifth of those of TTFT."""
_REWEIGHTED = 20
_SAME = 0.01
"""Relative error below which runs weigh equally in a fit."""
CHECKPOINTS: dict[tuple[str, str], tuple[str, dict[str, str]]] = {
    ("meta-llama/Llama-3.1-70B", "fp8"): ("nvidia/Llama-3.1-70B-Instruct-FP8", {}),
    ("meta-llama/Llama-3.1-70B", "fp4"): ("meta-llama/Meta-Llama-3.1-70B", {"gemm": "nvfp4"}),
    ("nvidia/Llama-3.1-8B-Instruct-FP8", "fp8"): ("meta-llama/Meta-Llama-3.1-8B", {"gemm": "fp8"}),
    ("MiniMaxAI/MiniMax-M2.5", "fp4"): ("nvidia/MiniMax-M2.5-NVFP4", {}),
    ("moonshotai/Kimi-K2.5", "fp4"): ("nvidia/Kimi-K2.5-NVFP4", {}),
}
"""Checkpoint and precisions of a run, where the model's own config.json does not say them."""
_PER_TENSOR: Sequence[dict[str, str]] = ({}, {"gemm": "fp8"}, {"gemm": "fp8", "moe": "fp8"})
"""Precisions of fp8 checkpoints with block scales; even runs decide which is nearest to vLLM's."""


class WholeRun(NamedTuple):
    """A run and the means that its clients measured, in seconds."""

    id: str
    model: str
    gpu: str
    precision: str
    version: str
    tensor_parallel: int
    expert_parallel: bool
    clients: int
    prompt_tokens: int
    output_tokens: int
    ttft_s: float
    tpot_s: float

    @property
    def is_fitted(self) -> bool:
        """True if constants may be fitted on runs of this configuration."""
        return is_fitted(repr(self.configuration))

    @property
    def configuration(self) -> tuple[Any, ...]:
        """Everything that was chosen for the run, without its figures."""
        return self[1:10]

    @property
    def group(self) -> tuple[str, ...]:
        return self[1:5]

    @property
    def engine(self) -> tuple[Any, ...]:
        return self[1:7]

    @property
    def latency_s(self) -> float:
        return self.ttft_s + (self.output_tokens - 1) * self.tpot_s


_START = (1.3e-3, 4e-5)
"""CPU times that a fit begins with, in seconds: of a step, and of each request in it."""


def _unfitted(run: WholeRun, host_s: float = 0.0, host_request_s: float = 0.0) -> RunConstants:
    """Return constants of the engine of ``run`` with these CPU times only."""
    in_flight = 1 if run.version == _WITHOUT_ASYNC else 2
    return RunConstants(EngineConstants(host_s, host_request_s, steps_in_flight=in_flight))


def main(argv: Sequence[str]) -> int:
    """Fit and judge each group of runs and write the errors; return the exit code."""
    parser = parser_of("silicon-runs", __doc__)
    parser.add_argument("--model", default="", help="only models whose name has this word")
    given = parser.parse_args(list(argv))
    measurement = Measurement("silicon-runs", given)
    groups: dict[tuple[str, ...], list[WholeRun]] = defaultdict(list)
    for run in read_runs():
        if given.model in run.model:
            groups[run.group].append(run)
    table = Table("runs", "number", "factors; CPU; launch; way", *_KINDS)
    samples: dict[str, list[Floats]] = defaultdict(list)
    raw = {}
    for group, runs in sorted(groups.items()):
        found = _judged(runs)
        if found is None:
            continue
        known, way = found.constants.engine, found.constants
        factors = f"{known.decode_factor:.2f}, {known.prompt_factor:.2f}"
        host = f"{known.host_s * 1e3:.1f} ms, {known.host_request_s * 1e6:.0f} us"
        of_way = f"{way.way_s * 1e3:.0f} ms, {way.way_token_s * 1e6:.0f} us"
        constants = f"{factors}; {host}; {known.launch_s * 1e3:.0f} ms; {of_way}"
        table.add_row(", ".join(group), *_cells(found.wrong, constants))
        raw[", ".join(group)] = {
            "constants": {
                "engine": asdict(known),
                "way_s": way.way_s,
                "way_token_s": way.way_token_s,
            },
            "ids": found.ids,
            "errors": found.wrong.tolist(),
        }
        for of_load, one in zip(found.loads, found.wrong, strict=True):
            samples[of_load].append(one)
            samples["all"].append(one)
    wrong_of = {name: np.array(wrong) for name, wrong in sorted(samples.items())}
    for name, wrong in wrong_of.items():
        table.add_row(name, *_cells(wrong))
    Console(width=160).print(table)
    figures: Samples = {
        f"{name}, {kind} {key}": (np.abs(wrong[:, row, column]).tolist(), _UNSIGNED)
        for name, wrong in wrong_of.items()
        for row, kind in enumerate(_KINDS)
        for column, key in enumerate(_ERRORS)
    }
    measurement.deliver(measurement.result(figures, [str(__doc__)], raw={"groups": raw}))
    return 0


_KINDS = ("summed", "fitted")
_ERRORS = ("TPOT", "TTFT", "latency")
_UNSIGNED = "relative error without sign"


def _cells(wrong: Floats, constants: str = "") -> list[str]:
    """Return cells of a row: number of runs, constants, mean and median of errors without signs.

    Args:
        wrong: [runs, kinds, errors].
    """
    means, medians = np.abs(wrong).mean(axis=0), np.median(np.abs(wrong), axis=0)
    words = [
        ", ".join(
            f"{name} {mean:.1%} ({median:.1%})"
            for name, mean, median in zip(_ERRORS, *of_kind, strict=True)
        )
        for of_kind in zip(means, medians, strict=True)
    ]
    return [str(len(wrong)), constants, *words]


def read_runs() -> list[WholeRun]:
    """Return the package's runs of vLLM on GPUs of one tensor-parallel engine.

    Raises:
        UserError: The package is not installed.
    """
    runs = [_run(row) for row in silicon_rows() if _is_usable(row)]
    return list({run[1:]: run for run in runs}.values())


def silicon_rows() -> Iterator[dict[str, str]]:
    """Yield all rows of whole runs in the package, of any backend.

    Raises:
        UserError: The package is not installed.
    """
    path = package_systems() / "silicon_sample.csv"
    with path.open(encoding="utf-8", newline="") as rows:
        yield from csv.DictReader(rows)


def _is_usable(row: dict[str, str]) -> bool:
    if (row["backend"], row["mode"]) != ("vllm", "agg"):
        return False
    width = number(row, "moe_tp_size") * number(row, "moe_ep_size")
    others = number(row, "pp_size") * number(row, "attention_dp_size")
    return others == 1 and width in (1, number(row, "tp_size"))


def _run(row: dict[str, str]) -> WholeRun:
    return WholeRun(
        row["id"],
        row["model_path"],
        row["system"],
        row["precision"],
        row["backend_version"],
        number(row, "tp_size"),
        number(row, "moe_ep_size") > 1,
        number(row, "batch_size"),
        int(row["isl"]),
        int(row["osl"]),
        float(row["silicon_ttft_ms"]) / 1e3,
        float(row["silicon_tpot_ms"]) / 1e3,
    )


def number(row: dict[str, str], key: str) -> int:
    """Return a whole number of a row, 1 for none."""
    return max(1, int(float(row[key] or 1)))


class KnownEngine(NamedTuple):
    """Operators of an engine, and the tokens that fit into its KV cache."""

    times: GpuStepTimes
    kv_tokens: int

    def simulated(self, run: WholeRun, constants: RunConstants) -> Simulated:
        """Return the means of ``run`` on this engine."""
        lengths = run.prompt_tokens, run.output_tokens
        engines = LoopEngines(1, self.times, self.kv_tokens, _STEP_TOKENS)
        return ClosedLoop(run.clients, lengths, engines, None, constants).run()


class JudgedRuns(NamedTuple):
    """Constants of a group and the errors of its odd runs, signed: [runs, kinds, errors]."""

    constants: RunConstants
    ids: Sequence[str]
    loads: Sequence[str]
    wrong: Floats


def _judged(runs: Sequence[WholeRun]) -> JudgedRuns | None:
    """Fit a group's constants and judge its odd runs; None if too few are known."""
    by_engine: dict[tuple[Any, ...], list[WholeRun]] = defaultdict(list)
    for run in runs:
        by_engine[run.engine].append(run)
    chosen: dict[tuple[Any, ...], KnownEngine] = {}
    first: dict[tuple[Any, ...], KnownEngine] = {}
    for key, ran in by_engine.items():
        engines = [one for kinds in _kinds(ran[0]) if (one := engine_of(ran[0], kinds))]
        even = [run for run in ran if run.is_fitted]
        if engines and even:
            first[key] = engines[0]
            near = even[:LEAST_RUNS]
            chosen[key] = min(engines, key=lambda one: _distance(one, near))
    even_runs = [run for run in runs if run.engine in chosen and run.is_fitted]
    judged = [run for run in runs if run.engine in chosen and not run.is_fitted]
    if len(even_runs) < LEAST_RUNS or not judged:
        return None
    constants = fitted(even_runs, chosen)
    summed = errors(judged, [first[run.engine].simulated(run, _unfitted(run)) for run in judged])
    of_fit = errors(judged, [chosen[run.engine].simulated(run, constants) for run in judged])
    loads = [_load(run, chosen[run.engine]) for run in judged]
    ids = [run.id for run in judged]
    return JudgedRuns(constants, ids, loads, np.stack([summed, of_fit], axis=1))


def _load(run: WholeRun, engine: KnownEngine) -> str:
    """Return the class of a run's load."""
    if run.clients * (run.prompt_tokens + run.output_tokens) > engine.kv_tokens:
        return "more than the KV cache holds"
    return (
        "to 8 clients"
        if run.clients <= 8
        else "to 64 clients"
        if run.clients <= 64
        else "more clients"
    )


def _kinds(run: WholeRun) -> Sequence[dict[str, str]]:
    """Return the precisions that the engine of ``run`` may have, beside those of its checkpoint."""
    is_known = run.precision != "fp8" or (run.model, run.precision) in CHECKPOINTS
    return ({},) if is_known else _PER_TENSOR


def _distance(engine: KnownEngine, runs: Sequence[WholeRun]) -> float:
    found = [engine.simulated(run, _unfitted(run, *_START)) for run in runs]
    return float(np.median(np.abs(errors(runs, found)[:, 0])))


def fitted(
    runs: Sequence[WholeRun], engines: Mapping[tuple[Any, ...], KnownEngine]
) -> RunConstants:
    """Return the constants with the least errors of TPOT and TTFT over ``runs``.

    A larger ``launch_s`` is taken where the errors are clearly smaller with it.
    """
    chosen, least = _unfitted(runs[0]), np.inf
    for launch_s in _LAUNCHES_S:
        error, constants = _fitted(runs, engines, launch_s)
        if error > _FAR * least:
            break
        if error < _CLEARLY * least:
            chosen, least = constants, error
    return chosen


def _fitted(
    runs: Sequence[WholeRun], engines: Mapping[tuple[Any, ...], KnownEngine], launch_s: float
) -> tuple[float, RunConstants]:
    """Return the least error over ``runs`` with this ``launch_s``, and the constants that have it.

    Which requests share a step changes with the constants, so a fit to the parts of a simulated run
    is not always better than the one before.
    """
    constants, tried = _unfitted(runs[0], *_START), []
    constants = constants._replace(engine=replace(constants.engine, launch_s=launch_s))
    for _ in range(_FITS):
        found = [engines[run.engine].simulated(run, constants) for run in runs]
        tpot, ttft, _ = np.abs(errors(runs, found)).sum(axis=0)
        tried.append((float(_TPOT_WEIGHT * tpot + ttft), constants))
        constants = _fit(runs, found, constants)
    return min(tried, key=lambda one: one[0])


def _fit(runs: Sequence[WholeRun], found: Sequence[Simulated], known: RunConstants) -> RunConstants:
    """Return the constants with which the parts of simulated runs come nearest to the real ones.

    TTFT and TPOT have the engine's constants in common: what a prompt takes shows in both.
    """
    of_tokens = np.array([[*one.parts, 0.0, 0.0] for one in found])
    of_firsts = np.array([one.first_parts for one in found])
    tpot_s = np.array([run.tpot_s for run in runs])
    ttft_s = np.array([run.ttft_s for run in runs])
    parts = np.concatenate([of_tokens, of_firsts])
    times_s = np.concatenate([tpot_s, ttft_s])
    decode, prompt, host_s, request_s, way_s, way_token_s = nearest(
        np.delete(parts, LAUNCHES, axis=1),
        times_s - parts[:, LAUNCHES],
        np.concatenate([tpot_s / _TPOT_WEIGHT, ttft_s]),
    )
    engine = replace(
        known.engine,
        host_s=host_s,
        host_request_s=request_s,
        decode_factor=max(LEAST_FACTOR, decode),
        prompt_factor=max(LEAST_FACTOR, prompt),
    )
    return RunConstants(engine, way_s=way_s, way_token_s=way_token_s)


def nearest(columns: Floats, values: Floats, scale: Floats | None = None) -> list[float]:
    """Return coefficients of 0 or more whose relative errors have the least sum.

    Args:
        columns: [runs, coefficients].
        scale: Values that the errors are relative to; ``values`` if None.
    """
    scale = values if scale is None else scale
    weights = 1 / scale
    for _ in range(_REWEIGHTED):
        found = least_squares([*(columns * weights[:, None]).T], values * weights)
        wrong = np.abs(columns @ np.array(found) - values) / scale
        weights = 1 / scale / np.sqrt(np.maximum(wrong, _SAME))
    return found


def errors(runs: Sequence[WholeRun], found: Sequence[Simulated]) -> Floats:
    """Return the relative errors of TPOT, TTFT and latency, signed: [runs, 3]."""
    wrong = []
    for run, one in zip(runs, found, strict=True):
        latency_s = one.ttft_s + (run.output_tokens - 1) * one.tpot_s
        ratios = (one.tpot_s / run.tpot_s, one.ttft_s / run.ttft_s, latency_s / run.latency_s)
        wrong.append([ratio - 1 for ratio in ratios])
    return np.array(wrong)


def engine_of(run: WholeRun, precisions: dict[str, str]) -> KnownEngine | None:
    """Return the engine of ``run`` as the package knows it; None if it lacks operators."""
    from aiconfigurator_core.sdk.memory import estimate_kv_cache

    model, of_model = CHECKPOINTS.get((run.model, run.precision), (run.model, {}))
    kinds = {**of_model, **precisions}
    parallel, experts = run.tensor_parallel, run.tensor_parallel if run.expert_parallel else 1
    try:
        times = AiconfiguratorTimes(model, run.gpu, parallel, run.expert_parallel, kinds)
        memory = estimate_kv_cache(
            model,
            run.gpu,
            "vllm",
            "current",
            max_num_tokens=_STEP_TOKENS,
            max_batch_size=run.clients,
            memory_fraction_kind="of_total",
            memory_fraction_value=_MEMORY_FRACTION,
            tp_size=parallel,
            moe_tp_size=parallel // experts,
            moe_ep_size=experts,
            **{f"{kind}_quant_mode": name for kind, name in kinds.items()},
        )
    except (UserError, ValueError):
        return None
    return KnownEngine(times, int(memory["total_kv_size_tokens"]))
