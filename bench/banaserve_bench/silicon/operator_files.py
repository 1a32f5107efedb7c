"""Files of measured operators in LLMServingSim's format: one prefix for a GPU, model and TP size.

``PREFIX_dense.csv``: microseconds by layer and tokens; ``PREFIX_per_sequence.csv``: by layer and
sequences; ``PREFIX_attention.csv``: by chunk, its computed tokens, decoding requests and the
context of each; ``PREFIX_moe.csv``, of models with experts: by tokens and experts in use;
``PREFIX_skew_fit.csv``, if it is there: the cost of unequal contexts, by bucket. Each may have
``.zst`` at its end.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Iterable, Sequence
from math import inf, isfinite
from pathlib import Path

from banaserve.base.errors import UserError
from banaserve.base.text.records import unpacked
from banaserve_bench.silicon.attention import AttentionRow, AttentionTable
from banaserve_bench.silicon.interpolation import Buckets, Grid
from banaserve_bench.silicon.step_times import Experts, OperatorSums

_ONCE = ("embedding", "final_layernorm")
_IN_LAYER = {
    "layernorm": 2,
    "qkv_proj": 1,
    "qk_norm": 1,
    "rotary_emb": 1,
    "o_proj": 1,
    "gate_up_proj": 1,
    "act_fn": 1,
    "down_proj": 1,
}
_SAMPLED = ("lm_head", "sampler")
_LABELS = ("n_label", "skew_rate_label", "kv_big_label", "kp_label")
_ATTENTION = ("prefill_chunk", "kv_prefill", "n_decode", "kv_decode")


def read_operators(
    prefix: Path,
    num_layers: int,
    experts: tuple[int, int] | None = None,
    graph_sizes: Sequence[int] = (),
) -> OperatorSums:
    """Return the step times that the files of ``prefix`` give.

    Args:
        experts: Number of experts and of those that a token uses; None for a dense model.

    Raises:
        UserError: A file is missing, has a wrong line or lacks a layer; the message names it.
    """
    dense = _by_layer(prefix, "dense", "tokens", {*_ONCE, *_IN_LAYER})
    if experts is None and dense and "down_proj" not in dense:
        raise UserError(f"{prefix} is of a model with experts: give that model")
    sequences = _by_layer(prefix, "per_sequence", "sequences", set(_SAMPLED))
    rows = _table(prefix, "attention", (*_ATTENTION, "time_us"))
    try:
        attention = AttentionTable(
            (
                AttentionRow(int(chunk), int(computed), int(requests), int(context), time_us / 1e6)
                for chunk, computed, requests, context, time_us in rows
            ),
            _alphas(prefix),
        )
        return OperatorSums(
            num_layers,
            _summed(dense, _IN_LAYER),
            _summed(dense, dict.fromkeys(_ONCE, 1)),
            _summed(sequences, dict.fromkeys(_SAMPLED, 1)),
            attention,
            None if experts is None else _experts(prefix, *experts),
            graph_sizes,
        )
    except ValueError as error:
        raise UserError(f"{prefix}: {error}") from error


def _alphas(prefix: Path) -> Buckets | None:
    """Return how unequal contexts cost; None if the prefix has no file of it, or an empty one."""
    path = _path(prefix, "skew_fit")
    if not path.exists():
        return None
    _, table = _rows(prefix, "skew_fit")
    try:
        rows = [
            (float(row["pc"]), *(_bound(row[label]) for label in _LABELS), float(row["alpha"]))
            for _, row in table
        ]
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(
            f"{path}: a row lacks a number or the bound of a bucket: {error}"
        ) from error
    return Buckets(rows) if rows else None


def _bound(label: str) -> float:
    """Return the upper bound that a label such as ``sr<=5%``, ``kvB<=4k`` or ``kp>8k`` states."""
    if ">" in label:
        return inf
    number = label.partition("=")[2]
    return float(number.rstrip("%k")) * {"%": 0.01, "k": 1024}.get(number[-1:], 1)


def _experts(prefix: Path, num_experts: int, experts_per_token: int) -> Experts:
    rows = _table(prefix, "moe", ("tokens", "activated_experts", "time_us"))
    times = Grid((tokens, used, time_us / 1e6) for tokens, used, time_us in rows)
    return Experts(num_experts, experts_per_token, times)


def _summed(times: dict[str, dict[float, float]], counts: dict[str, int]) -> Grid:
    """Return the sum of the layers in ``counts`` by the points that all of them share."""
    found = {name: times[name] for name in counts if name in times}
    shared = set.intersection(*(set(points) for points in found.values())) if found else set()
    return Grid(
        (point, sum(counts[name] * points[point] for name, points in found.items()))
        for point in shared
    )


def _by_layer(
    prefix: Path, part: str, column: str, known: set[str]
) -> dict[str, dict[float, float]]:
    """Return seconds by layer and point of one file; other layers than ``known`` are an error."""
    path, table = _rows(prefix, part)
    times: dict[str, dict[float, float]] = defaultdict(dict)
    for number, row in table:
        layer = row.get("layer")
        if layer not in known:
            raise UserError(f"{path}, line {number}: layer {layer!r} is not known")
        point, time_us = _numbers(path, number, row, (column, "time_us"))
        times[layer][point] = time_us / 1e6
    return times


def _table(prefix: Path, part: str, columns: Sequence[str]) -> list[tuple[float, ...]]:
    path, table = _rows(prefix, part)
    return [_numbers(path, number, row, columns) for number, row in table]


def _rows(prefix: Path, part: str) -> tuple[Path, Iterable[tuple[int, dict[str, str]]]]:
    path = _path(prefix, part)
    try:
        lines = unpacked(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text: {error.reason}") from error
    return path, enumerate(csv.DictReader(lines), start=2)


def _path(prefix: Path, part: str) -> Path:
    path = prefix.with_name(f"{prefix.name}_{part}.csv")
    return path if path.exists() else path.with_name(f"{path.name}.zst")


def _numbers(
    path: Path, number: int, row: dict[str, str], columns: Sequence[str]
) -> tuple[float, ...]:
    try:
        found = tuple(float(row[column]) for column in columns)
    except (KeyError, TypeError, ValueError) as error:
        raise UserError(f"{path}, line {number}: give numbers in {', '.join(columns)}") from error
    if not all(isfinite(one) and one >= 0 for one in found):
        raise UserError(f"{path}, line {number}: a value is no finite number of 0 or more")
    return found
