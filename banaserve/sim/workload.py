"""Requests for a simulation: drawn from a seed, or read from a trace."""

from __future__ import annotations

import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from banaserve.errors import UserError
from banaserve.names import check_known
from banaserve.sim.request import SimRequest

LENGTH_KINDS = ("fixed", "lognormal", "uniform")


@dataclass(frozen=True, slots=True, kw_only=True)
class Lengths:
    """A distribution of token counts, cut to ``low`` and ``high``.

    Attributes:
        kind: ``fixed`` is always ``mean``; ``uniform`` lies between ``low`` and ``high``;
            ``lognormal`` has this ``mean`` and ``spread``, the deviation of the logarithm.
    """

    kind: str
    mean: float = 0.0
    low: int = 1
    high: int = 1_000_000
    spread: float = 0.5

    def __post_init__(self) -> None:
        check_known("kind of lengths", self.kind, LENGTH_KINDS)
        if not 1 <= self.low <= self.high:
            raise UserError(f"lengths from {self.low} to {self.high}: give 1 <= low <= high")
        if self.kind != "uniform" and not 1 <= self.mean < math.inf:
            raise UserError(f"mean is {self.mean}: give a length of at least 1")
        if not 0 <= self.spread <= 5:
            raise UserError(f"spread is {self.spread}: give a number in [0, 5]")

    def draw(self, draws: random.Random) -> int:
        if self.kind == "fixed":
            value = self.mean
        elif self.kind == "uniform":
            value = draws.randint(self.low, self.high)
        else:
            value = draws.lognormvariate(math.log(self.mean) - self.spread**2 / 2, self.spread)
        return min(self.high, max(self.low, round(value)))


@dataclass(frozen=True, slots=True, kw_only=True)
class Phase:
    """A stretch of a workload.

    Attributes:
        rate_per_s: Mean arrivals a second; gaps are gamma distributed.
        variation: Coefficient of variation of the gaps: 1 is Poisson, above it comes in bursts.
    """

    duration_s: float
    rate_per_s: float
    prompt: Lengths
    output: Lengths
    variation: float = 1.0

    def __post_init__(self) -> None:
        for name in ("duration_s", "rate_per_s", "variation"):
            value = getattr(self, name)
            if not isinstance(value, int | float) or not 0 < value < math.inf:
                raise UserError(f"{name} is {value!r}: give more than 0")


def drawn(phases: Sequence[Phase], seed: int, repeat: int = 1) -> Iterator[SimRequest]:
    """Yields the requests of ``phases``, one after the other, ``repeat`` times over."""
    draws = random.Random(f"{seed} workload")
    start_s, number = 0.0, 0
    for phase in [*phases] * repeat:
        shape = phase.variation**-2
        scale = 1 / (phase.rate_per_s * shape)
        at_s = start_s + draws.gammavariate(shape, scale)
        while at_s < start_s + phase.duration_s:
            prompt, output = phase.prompt.draw(draws), phase.output.draw(draws)
            yield SimRequest(number, at_s, prompt, output)
            number += 1
            at_s += draws.gammavariate(shape, scale)
        start_s += phase.duration_s


def traced(
    path: Path, limit: int | None = None, speed: float = 1.0, max_tokens: int | None = None
) -> Iterator[SimRequest]:
    """Yields the requests of a trace: JSON lines (``.zst`` with the zstandard package).

    Each has ``timestamp`` (ms) or ``t`` (s), ``input_length``, ``output_length``, and
    ``hash_ids`` where prefixes are known.

    Args:
        speed: 2 makes the trace run twice as fast.
        max_tokens: Longer requests are cut to this context: the prompt's end, then the output.

    Raises:
        UserError: The file cannot be read, or a line is wrong; names line and field.
    """
    records = [(number, _record(path, number, line)) for number, line in _lines(path, limit)]
    times_s = [_time_s(path, number, record) for number, record in records]
    order = sorted(range(len(records)), key=lambda place: (times_s[place], place))
    first_s = times_s[order[0]] if order else 0.0
    for count, place in enumerate(order):
        number, record = records[place]
        prompt = _length(path, number, record, "input_length")
        output = _length(path, number, record, "output_length")
        if max_tokens is not None:
            prompt = min(prompt, max_tokens - 1)
            output = min(output, max_tokens - prompt)
        ids = record.get("hash_ids") or ()
        if isinstance(ids, str):
            ids = json.loads(ids)
        at_s = (times_s[place] - first_s) / speed
        yield SimRequest(count, at_s, prompt, output, tuple(ids))


def _lines(path: Path, limit: int | None) -> Iterator[tuple[int, bytes]]:
    try:
        data = path.read_bytes()
    except OSError as error:
        raise UserError(f"cannot read {path}: {error.strerror or error}") from error
    if path.suffix == ".zst":
        try:
            import zstandard
        except ImportError as error:
            raise UserError(f"{path} is compressed: install the package zstandard") from error
        data = zstandard.ZstdDecompressor().stream_reader(data, read_across_frames=True).read()
    count = 0
    for number, line in enumerate(data.split(b"\n"), start=1):
        if line.strip():
            if limit is not None and count >= limit:
                return
            count += 1
            yield number, line


def _record(path: Path, number: int, line: bytes) -> Mapping[str, Any]:
    try:
        record = json.loads(line)
    except ValueError as error:
        raise UserError(f"{path}, line {number}: not JSON: {error}") from error
    if not isinstance(record, dict):
        raise UserError(f"{path}, line {number}: not an object")
    return record


def _time_s(path: Path, number: int, record: Mapping[str, Any]) -> float:
    value = record.get("t", record.get("timestamp"))
    if isinstance(value, bool) or not isinstance(value, int | float) or value < 0:
        raise UserError(f"{path}, line {number}: no arrival time in t (s) or timestamp (ms)")
    return float(value if "t" in record else value / 1000)


def _length(path: Path, number: int, record: Mapping[str, Any], key: str) -> int:
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise UserError(f"{path}, line {number}: {key} is {value!r}: give a whole number above 0")
    return value
