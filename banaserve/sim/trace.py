"""Traces of requests, checked as a whole before anything runs.

Mooncake's and Azure's formats, access logs with token counts, and the front door's own requests.
"""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from banaserve.base.errors import UserError
from banaserve.base.text.records import read_objects, unpacked
from banaserve.sim.request import SimRequest

_MAX_TOKENS = 10**9
_MAX_DIGITS = 10
_MAX_SHOWN_CHARS = 80
_TIMES = ("t", "timestamp", "arrived_at_s", "arrival_time", "time", "ts", "created", "TIMESTAMP")
_LENGTHS = (
    ("input_length", "output_length"),
    ("ContextTokens", "GeneratedTokens"),
    ("prompt_tokens", "completion_tokens"),
    ("prompt_tokens", "output_tokens"),
    ("input_tokens", "output_tokens"),
    ("input_toks", "output_toks"),
)
_OF_TRACES = 2
"""Number of pairs of keys that traces have; the others are of logs, which also have failures."""
_EPOCH_S, _EPOCH_MS = 1e9, 1e11
"""Least time since 1970 that is taken for one in seconds and in milliseconds."""
_MAX_TIME = 1e14
"""Maximum time in s or ms; larger ones are in other units."""
KNOWN_KEYS = (
    "give t (s), timestamp (ms) or time (s, or a date), with input_length and output_length or "
    "prompt_tokens and completion_tokens"
)


class Arrival(NamedTuple):
    """Line of a trace; ``at_s`` counts from the first arrival."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, limit: int | None = None) -> list[Arrival]:
    """Return the first ``limit`` requests of a trace, in the order of their arrivals.

    Objects in JSON lines or in one JSON list, or the lines of a ``.csv`` with a heading, each
    ``.zst`` with the zstandard package, have

    - a time: ``t`` (s), ``timestamp`` (ms, Mooncake), Azure's ``TIMESTAMP`` or one of the other
      names of logs (s). A text is a date, and a number since 1970 may be in s or ms;
    - lengths: ``input_length`` and ``output_length``, Azure's ``ContextTokens`` and
      ``GeneratedTokens``, or as logs name them, ``usage`` of OpenAI's API among them;
    - ``hash_ids`` if prefixes are known.

    Requests of a log without output, or still under way, are left out: they failed, or their
    lengths are unknown. The list that ``banaserve trace --json`` prints is such a log.

    Raises:
        UserError: The file cannot be read, holds no request, or a line is wrong; the message names
            file, line and key.
    """
    rows = (
        Arrival(time_s(where, record), *lengths(where, record), _hash_ids(where, record))
        for where, record in islice(trace_records(path), limit)
    )
    found = sorted(rows, key=lambda row: row.at_s)
    if not found:
        raise UserError(f"{path} holds no request")
    return [row._replace(at_s=row.at_s - found[0].at_s) for row in found]


def requests_of(
    rows: Sequence[Arrival], speed: float = 1.0, max_tokens: int | None = None
) -> Iterator[SimRequest]:
    """Yield requests that arrive as in ``rows``.

    Args:
        speed: Speed-up of the trace: 2 makes it run twice as fast.
        max_tokens: Context size in tokens to which longer requests are cut, see ``cut``.
    """
    for number, row in enumerate(rows):
        prompt, output = cut(row.prompt_tokens, row.output_tokens, max_tokens)
        yield SimRequest(number, row.at_s / speed, prompt, output, row.hash_ids)


def cut(prompt: int, output: int, max_tokens: int | None) -> tuple[int, int]:
    """Return both lengths cut to a context of ``max_tokens``; the prompt is cut first."""
    if max_tokens is None or prompt + output <= max_tokens:
        return prompt, output
    output = min(output, max_tokens - 1)
    return min(prompt, max_tokens - output), output


def trace_records(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the requests of a trace or log as they are there, with their places.

    Raises:
        UserError: The file cannot be read, or a line is neither an object nor a row of a table.
    """
    is_table = path.name.removesuffix(".zst").endswith(".csv")
    for where, record in _table(path) if is_table else read_objects(path):
        if isinstance(usage := record.get("usage"), dict):
            record = {**record, **usage}
        if not _is_without_answer(record):
            yield where, record


def _is_without_answer(record: Mapping[str, Any]) -> bool:
    if record.get("end") == "":  # the front door's word for a request under way
        return True
    pair = _pair(record)
    return pair in _LENGTHS[_OF_TRACES:] and record.get(pair[1]) in (0, "0")


def has_time(record: Mapping[str, Any]) -> bool:
    """Return whether a request has a time of arrival."""
    return any(record.get(key) is not None for key in _TIMES)


def has_lengths(record: Mapping[str, Any]) -> bool:
    """Return whether a request has a length, right or wrong."""
    return _pair(record) is not None


def lengths(where: str, record: Mapping[str, Any]) -> tuple[int, int]:
    """Return prompt and output tokens of a request at the place ``where``, each above 0.

    Raises:
        UserError: There are none, or one is anything else; the message names place and key.
    """
    pair = _pair(record)
    if pair is None:
        raise UserError(f"{where}: no lengths: {KNOWN_KEYS}")
    return _length(where, record, pair[0]), _length(where, record, pair[1])


def _pair(record: Mapping[str, Any]) -> tuple[str, str] | None:
    """Return the keys of the lengths: of both, or else of the one that is there."""
    for wanted in (all, any):
        for pair in _LENGTHS:
            if wanted(key in record for key in pair):
                return pair
    return None


def _length(where: str, record: Mapping[str, Any], key: str) -> int:
    value = record.get(key)
    if isinstance(value, str) and value.strip().isdecimal() and len(value) <= _MAX_DIGITS:
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_TOKENS:
        raise UserError(f"{where}: {key} is {_shown(value)}: give a whole number above 0")
    return value


def time_s(where: str, record: Mapping[str, Any]) -> float:
    """Return the time of arrival of a request at the place ``where``, in seconds.

    Raises:
        UserError: There is none, or it is neither a number in s or ms, of 0 or more, nor a date.
    """
    key = next((one for one in _TIMES if one in record), "t")
    value: Any = record.get(key)
    if isinstance(value, str):
        try:
            value = float(value)
        except ValueError:
            return _date_s(where, key, value.strip())
    if type(value) not in (int, float) or not 0 <= value <= _MAX_TIME:
        raise UserError(
            f"{where}: no arrival time in t (s), timestamp (ms) or time (s, or a date): "
            f"{key} is {_shown(value)}"
        )
    is_ms = value >= _EPOCH_MS or (key == "timestamp" and value < _EPOCH_S)
    return value / 1000 if is_ms else float(value)


def _date_s(where: str, key: str, text: str) -> float:
    try:
        at = datetime.fromisoformat(text)
    except ValueError as error:
        raise UserError(f"{where}: {key} is {_shown(text)}: give a date") from error
    # Some of Azure's traces state the offset from UTC; others are in UTC and state none.
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def _hash_ids(where: str, record: Mapping[str, Any]) -> tuple[int, ...]:
    ids = record.get("hash_ids") or ()
    try:
        ids = json.loads(ids) if isinstance(ids, str) else ids
    except (ValueError, RecursionError):
        ids = None
    if not isinstance(ids, list | tuple) or not all(type(entry) is int for entry in ids):
        raise UserError(f"{where}: hash_ids is no list of whole numbers")
    return tuple(ids)


def _table(path: Path) -> Iterator[tuple[str, dict[str, str]]]:
    try:
        lines = unpacked(path).decode("utf-8-sig").splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text: {error.reason}") from error
    table = csv.reader(lines)
    try:
        yield from _table_rows(path, table)
    except csv.Error as error:
        line = table.line_num + 1
        raise UserError(f"{path}, line {line}: no line of a table: {error}") from None


def _table_rows(path: Path, table: Any) -> Iterator[tuple[str, dict[str, str]]]:
    heading: list[str] = next(table, [])
    pair = _pair(dict.fromkeys(heading))
    if pair is None:
        raise UserError(f"{path}, line 1: there are no columns of lengths: {KNOWN_KEYS}")
    for column in pair:
        if column not in heading:
            raise UserError(f"{path}, line 1: there is no column {column}")
    for cells in table:
        if cells:
            cells += [""] * (len(heading) - len(cells))
            yield f"{path}, line {table.line_num}", dict(zip(heading, cells, strict=False))


def _shown(value: object) -> str:
    return repr(value)[:_MAX_SHOWN_CHARS]
