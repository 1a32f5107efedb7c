"""Share of the store's transfers that hides behind the computation.

``python -m benchmarks pipeline``. One engine gets prompts of which a part is in the store, and
reports when each layer was fetched, computed and saved. Copies are slowed down to bandwidths on
both sides of the break-even that the corrected equations 12 and 13 predict from the time to compute
the whole prompt. Each prompt runs pipelined, layer by layer, and serial: everything is fetched
before the forward pass and saved after it. Two more prompts run pipelined: one of which nothing is
fetched, and one of which the cost gate chooses the best number of blocks to fetch over that link.
"""

from __future__ import annotations

import argparse
import contextlib
import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from math import isnan
from typing import Any

import numpy as np

from banaserve.base import models
from banaserve.base.arguments import positive
from banaserve.base.errors import UserError
from banaserve_bench.results.statistics import median, paired_ratios
from benchmarks.drivers.layer_pipeline import Prefill, hidden_fraction, pipeline
from benchmarks.drivers.traced_engine import TracedEngine, traced_engine
from benchmarks.measurement import (
    Measurement,
    Samples,
    model_of,
    parser_of,
    progress_of,
    random_tokens,
)
from benchmarks.random_model import SIZES, random_weights

_FACTORS = (0.2, 0.4, 0.6, 0.8, 1.25, 2.0, 4.0)
"""Bandwidths as multiples of the predicted break-even."""
_WAYS: dict[str, dict[str, Any]] = {
    "pipelined": {},
    "serial": {"is_serial": True},
    "computed": {"way": "compute"},
    "cut": {"way": "cut"},
}
"""Options of the driven engine; the first way lets the gate learn the speed of the link."""
_WARM_UPS = 2
_LOAD, _LOADED, _WAIT, _WAITED, _ATTENDED, _SAVE, _SAVED = range(7)
_NOTES = [
    "Nx: the copies are held back to N times the predicted break-even, in both directions",
    "hidden_fraction: of each run the worst bandwidth at which equation 13 is below equation 12",
    "compute_vs_equation_12: what computing the rest took, against T_F (1 - r); above 1 by the "
    "attention over the fetched part, which the equation leaves out, so fetches hide earlier",
    "pipelined fetches all cached blocks, computed none, cut as many as the cost gate finds best, "
    "which knows the link from the pipelined prompts before it",
    "cut_vs_best: step of the cut prompt over the shorter one of pipelined and computed",
    "visible: waits for a layer's fetch, and what follows the forward pass, the commit included",
    "the first layer's fetch and the last layer's save can hide behind nothing: 1/layers of each",
    "float32, one OMP thread, a prompt is one step",
]


def main(argv: Sequence[str]) -> int:
    parser = parser_of("pipeline", __doc__)
    parser.add_argument("--model", default=models.PACKAGED)
    parser.add_argument("--size", choices=sorted(SIZES), help="random weights instead of --model")
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument("--blocks", type=int, default=6, help="of a prompt")
    parser.add_argument("--cached-blocks", type=int, default=4, help="of them, in the store")
    parser.add_argument("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    if not 0 < given.cached_blocks < given.blocks:
        raise UserError("--cached-blocks is above 0 and below --blocks")
    measurement = Measurement("pipeline", given)
    with model_name(given) as model:
        samples, predicted, warm_compute_s = _measure(given, model)
    set_by = replace(predicted, full_compute_s=warm_compute_s).break_even_bytes_per_s()
    figures, raw = _figures(samples, predicted, set_by), _raw(samples, predicted, set_by)
    measurement.deliver(measurement.result(figures, _NOTES, raw=raw))
    return 0


def model_name(given: argparse.Namespace) -> contextlib.AbstractContextManager[str]:
    """Return the model that ``--model`` or ``--size`` names, while the context is open."""
    if given.size:
        return random_weights(given.size, "float32")
    return contextlib.nullcontext(given.model)


def _measure(given: argparse.Namespace, name: str) -> tuple[_Prefills, Prefill, float]:
    """Return the samples, the prediction, and the computing time that set the bandwidths."""
    model = model_of(name)
    draws = random.Random(given.seed)
    with (
        traced_engine(model.path_or_id, "512MiB") as engine,
        progress_of(given.runs, "measuring") as advance,
    ):
        warm = [
            times_of(engine.prefill(_tokens(draws, given.blocks, engine))) for _ in range(_WARM_UPS)
        ]
        predicted = _prefill(given, engine, warm[-1].compute_s)
        prefix = _tokens(draws, given.cached_blocks, engine)
        engine.prefill(prefix)
        samples = _Prefills([], {(way, f): [] for f in _FACTORS for way in _WAYS})
        for _ in range(given.runs):
            _one_run(given, engine, draws, prefix, predicted.break_even_bytes_per_s(), samples)
            advance("measuring")
    # The bandwidths came from the warm-up; the prediction that counts comes from the runs.
    predicted = replace(
        predicted, full_compute_s=median([times.compute_s for times in samples.full])
    )
    return samples, predicted, warm[-1].compute_s


def _one_run(
    given: argparse.Namespace,
    engine: TracedEngine,
    draws: random.Random,
    prefix: list[int],
    break_even_bytes_per_s: float,
    samples: _Prefills,
) -> None:
    samples.full.append(times_of(engine.prefill(_tokens(draws, given.blocks, engine))))
    for (way, factor), times in samples.cached.items():
        bandwidth = factor * break_even_bytes_per_s
        rest = _tokens(draws, given.blocks - given.cached_blocks, engine)
        step = engine.prefill(
            prefix + rest,
            new_link=way == next(iter(_WAYS)),
            load_bytes_per_s=bandwidth,
            save_bytes_per_s=bandwidth,
            **_WAYS[way],
        )
        times.append(times_of(step))


def _tokens(draws: random.Random, num_blocks: int, engine: TracedEngine) -> list[int]:
    return random_tokens(draws, num_blocks * engine.block_size)


def _prefill(given: argparse.Namespace, engine: TracedEngine, full_compute_s: float) -> Prefill:
    return Prefill(
        full_compute_s,
        engine.num_layers,
        given.blocks * engine.block_size,
        given.cached_blocks / given.blocks,
        engine.token_layer_bytes,
    )


@dataclass(frozen=True, slots=True)
class PrefillTimes:
    """Times of one prompt's forward pass, in seconds.

    Attributes:
        step_s: Time from its beginning until everything was saved and committed.
        fetch_s: Total time of all layers' fetches.
        store_s: Total time of all layers' saves.
        fetch_wait_s: Time that the forward pass waited for fetches.
        store_wait_s: Time that saves went on after the forward pass.
        compute_s: Time of the forward pass without waiting.
    """

    step_s: float
    fetch_s: float
    store_s: float
    fetch_wait_s: float
    store_wait_s: float
    compute_s: float
    fetched_blocks: int

    @property
    def transfer_s(self) -> float:
        return self.fetch_s + self.store_s

    @property
    def visible_s(self) -> float:
        return self.fetch_wait_s + self.store_wait_s


@dataclass(frozen=True, slots=True)
class _Prefills:
    """Measured times.

    Attributes:
        full: Times of the whole prompt computed, one for each run.
        cached: Times by way and factor, one for each run.
    """

    full: list[PrefillTimes]
    cached: dict[tuple[str, float], list[PrefillTimes]]


def times_of(step: dict[str, Any]) -> PrefillTimes:
    """Return the times in a step's trace."""
    layers: list[list[float]] = step["layers"]
    began_s, forward_s = step["began_s"], step["forward_s"]
    loads = [layer for layer in layers if not isnan(layer[_LOAD])]
    first_load_s = min((layer[_LOAD] for layer in loads), default=forward_s)
    fetch_wait_s = max(0.0, forward_s - first_load_s)
    fetch_wait_s += sum(layer[_WAITED] - layer[_WAIT] for layer in layers)
    saves = [layer for layer in layers if not isnan(layer[_SAVE])]
    return PrefillTimes(
        step_s=step["ended_s"] - began_s,
        fetch_s=sum(layer[_LOADED] - layer[_LOAD] for layer in loads),
        store_s=sum(layer[_SAVED] - layer[_SAVE] for layer in saves),
        fetch_wait_s=fetch_wait_s,
        store_wait_s=step["ended_s"] - step["computed_s"],
        compute_s=step["computed_s"] - began_s - fetch_wait_s,
        fetched_blocks=step["fetched_blocks"],
    )


def _figures(samples: _Prefills, predicted: Prefill, set_by: float) -> Samples:
    """Return samples and unit of each figure; the factors multiply the bandwidth ``set_by``."""
    full = [times.compute_s for times in samples.full]
    rest = [times.compute_s for times in samples.cached["pipelined", _FACTORS[-1]]]
    break_evens = [replace(predicted, full_compute_s=s).break_even_bytes_per_s() for s in full]
    equation_12 = [s * (1 - predicted.cached_fraction) for s in full]
    figures = {
        "full_compute": (full, "s"),
        "predicted_break_even": (break_evens, "bytes/s"),
        "compute_vs_equation_12": (paired_ratios(rest, equation_12), "ratio"),
        "measured_break_even": (_break_evens(samples, set_by), "bytes/s"),
        "hidden_fraction": (_worst_hidden(samples, set_by, predicted), "fraction"),
    }
    for factor in _FACTORS:
        piped = samples.cached["pipelined", factor]
        serial = samples.cached["serial", factor]
        ratios = paired_ratios([t.step_s for t in piped], [t.step_s for t in serial])
        figures[f"hidden_fraction_at_{factor}x"] = ([_hidden(t) for t in piped], "fraction")
        figures[f"hidden_fraction_serial_at_{factor}x"] = ([_hidden(t) for t in serial], "fraction")
        figures[f"step_vs_serial_at_{factor}x"] = (ratios, "ratio")
        figures |= _cut_figures(samples, factor)
    return figures


def _cut_figures(samples: _Prefills, factor: float) -> Samples:
    """Return figures of the cut prompt, beside the fetched one and the computed one."""
    steps_s = {
        way: [times.step_s for times in samples.cached[way, factor]]
        for way in ("pipelined", "computed", "cut")
    }
    best = [min(pair) for pair in zip(steps_s["pipelined"], steps_s["computed"], strict=True)]
    fetched = [float(times.fetched_blocks) for times in samples.cached["cut", factor]]
    return {
        **{f"step_{way}_at_{factor}x": (taken, "s") for way, taken in steps_s.items()},
        f"cut_blocks_fetched_at_{factor}x": (fetched, "blocks"),
        f"cut_vs_best_at_{factor}x": (paired_ratios(steps_s["cut"], best), "ratio"),
    }


def _raw(samples: _Prefills, predicted: Prefill, set_by: float) -> dict[str, Any]:
    return {
        "bandwidths": {str(factor): factor * set_by for factor in _FACTORS},
        "predicted_hidden_fraction": {
            str(factor): _predicted_hidden(predicted, factor * set_by) for factor in _FACTORS
        },
        "samples": [
            {"arrangement": a, "factor": f, **asdict(times)}
            for (a, f), runs in samples.cached.items()
            for times in runs
        ],
    }


def _hidden(times: PrefillTimes) -> float:
    return hidden_fraction(times.transfer_s, times.visible_s)


def _worst_hidden(samples: _Prefills, set_by: float, predicted: Prefill) -> list[float]:
    hiding = [factor for factor in _FACTORS if predicted.hides(factor * set_by)]
    if not hiding:
        raise UserError("the machine became so much faster that no bandwidth was enough: run again")
    runs = zip(*(samples.cached["pipelined", factor] for factor in hiding), strict=True)
    return [min(_hidden(times) for times in run) for run in runs]


def _predicted_hidden(predicted: Prefill, bandwidth: float) -> float:
    layers = predicted.num_layers
    fetch, store = predicted.fetch_layer_s(bandwidth), predicted.store_layer_s(bandwidth)
    line = pipeline([fetch] * layers, [predicted.compute_layer_s()] * layers, [store] * layers)
    return hidden_fraction(layers * (fetch + store), line.fetch_wait_s + line.store_wait_s)


def _break_evens(samples: _Prefills, set_by: float) -> list[float]:
    below = [factor for factor in _FACTORS if factor < 1]
    runs = zip(*(samples.cached["pipelined", factor] for factor in below), strict=True)
    return [
        measured_break_even(
            [
                (factor * set_by, times.fetch_wait_s)
                for factor, times in zip(below, run, strict=True)
            ]
        )
        for run in runs
    ]


def measured_break_even(waits: Sequence[tuple[float, float]]) -> float:
    """Return the bandwidth at which fetches begin to hide, from the times waited for them.

    Below it the forward pass waits for ``a / B - c``: the fetch of all layers less their
    computation. That is a line in ``1 / B``, and it meets zero at ``B = a / c``.

    Args:
        waits: Pairs of bandwidth in bytes/s and seconds waited, all below the break-even.
    """
    bandwidths, seconds = np.asarray(waits, dtype=np.float64).T
    slope, intercept = np.polyfit(1 / bandwidths, seconds, 1)
    return float(slope / -intercept)
