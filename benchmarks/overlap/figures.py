"""Figures of ``bench overlap``: gains, and the engine's predictions of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

from benchmarks.overlap.neighbour import NeighbourSharing

Samples = dict[str, tuple[list[float], str]]
"""Samples and unit, by the figure's name."""


class OverlapLoad(NamedTuple):
    """Requests that are served at once.

    Attributes:
        name: ``prefill``, ``ttft``, or ``decode_`` and the batch.
        gain: Name of the gain in the figures.
    """

    name: str
    gain: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int


class Times(NamedTuple):
    """Seconds and answers of each load, one for each round.

    Attributes:
        sums_s: Sums over the layers of steps that may be cut, as the worker counts them, in
            seconds.
    """

    seconds: dict[str, list[float]]
    tokens: dict[str, list[Any]]
    equal: dict[str, list[float]]
    sums_s: dict[str, list[dict[str, float]]]

    @classmethod
    def of(cls, loads: Sequence[OverlapLoad]) -> Times:
        """Return empty times of ``loads``."""
        names = [load.name for load in loads]
        return cls(
            {name: [] for name in names},
            {name: [] for name in names},
            {name: [] for name in names},
            {name: [] for name in names},
        )


def gains(name: str, loads: Sequence[OverlapLoad], home: Times, times: Times) -> Samples:
    """Return the gain over having all layers at home, and whether the answers are the same."""
    samples: Samples = {}
    for load in loads:
        pairs = zip(home.seconds[load.name], times.seconds[load.name], strict=True)
        samples[f"{name}.{load.gain}"] = [ours / theirs for ours, theirs in pairs], "ratio"
    equal = [min(row) for row in zip(*times.equal.values(), strict=True)]
    samples[f"{name}.equal_answers"] = equal, "fraction"
    return samples


def beside_waiting(
    name: str, loads: Sequence[OverlapLoad], waiting: Times, times: Times
) -> Samples:
    """Return the gain over waiting for the guest, and the engine's prediction of it."""
    samples: Samples = {}
    for load in loads:
        pairs = zip(waiting.seconds[load.name], times.seconds[load.name], strict=True)
        over = [theirs / ours for theirs, ours in pairs]
        samples[f"{name}.{load.gain}_over_waiting"] = over, "ratio"
        # If no step was predicted, all steps were too small to be cut.
        predicted = [
            sums["waiting"] / sums["predicted"] if sums["predicted"] else 1.0
            for sums in times.sums_s[load.name]
        ]
        samples[f"{name}.{load.gain}_predicted"] = predicted, "ratio"
    each = [list(sums) for sums in zip(*times.sums_s.values(), strict=True)]
    wrong = [sum(s["wrong"] for s in sums) / sum(s["measured"] for s in sums) for sums in each]
    samples[f"{name}.prediction_error"] = wrong, "fraction"
    return samples


def sharing(name: str, runs: Sequence[NeighbourSharing]) -> Samples:
    """Return the effect of a guest on an engine beside it."""
    return {
        f"{name}.slow_down": ([run.slow_down for run in runs], "ratio"),
        f"{name}.slow_down_predicted": ([run.predicted for run in runs], "ratio"),
        f"{name}.guest_busy": ([run.busy_fraction for run in runs], "fraction"),
        f"{name}.prefill_s": ([run.prefill_s for run in runs], "s"),
    }


def headlines(samples: Samples, layers: int) -> Samples:
    """Return the gains with most layers away under names of their own."""
    prefix = f"layers_{layers}.overlap."
    return {
        name.removeprefix(prefix): sample
        for name, sample in samples.items()
        if name.startswith(prefix)
    }
