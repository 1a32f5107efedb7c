"""Traces of requests: Mooncake's and Azure's formats, checked as a whole before anything runs."""

from __future__ import annotations

import csv
import json
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from banaserve.base.errors import UserError
from banaserve.base.text.records import read_records, unpacked
from banaserve.sim.request import SimRequest

_MAX_TOKENS = 10**9
_MAX_DIGITS = 10
_MAX_SHOWN_CHARS = 80
AZURE_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")


class Arrival(NamedTuple):
    """Line of a trace; ``at_s`` counts from the first arrival."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    hash_ids: tuple[int, ...] = ()


def read_trace(path: Path, limit: int | None = None) -> list[Arrival]:
    """Return the first ``limit`` requests of a trace, in the order of their arrivals.

    JSON lines (``.zst`` with the zstandard package) have ``timestamp`` (ms, Mooncake) or ``t``
    (s), ``input_length``, ``output_length``, and ``hash_ids`` if prefixes are known. A ``.csv``
    has Azure's columns TIMESTAMP, ContextTokens and GeneratedTokens.

    Raises:
        UserError: The file cannot be read, holds no request, or a line is wrong; the message names
            file, line and key.
    """
    name = path.name.removesuffix(".zst")
    rows = _azure(path, limit) if name.endswith(".csv") else _json_lines(path, limit)
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


def length(path: Path, number: int, record: Mapping[str, Any], key: str) -> int:
    """Return the length ``key`` of a record, a whole number above 0.

    Raises:
        UserError: The value is anything else; the message names file, line and key.
    """
    value = record.get(key)
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MAX_TOKENS:
        shown = repr(value)[:_MAX_SHOWN_CHARS]
        raise UserError(f"{path}, line {number}: {key} is {shown}: give a whole number above 0")
    return value


def _json_lines(path: Path, limit: int | None) -> list[Arrival]:
    return [
        Arrival(
            _time_s(path, number, record),
            length(path, number, record, "input_length"),
            length(path, number, record, "output_length"),
            _hash_ids(path, number, record),
        )
        for number, record in read_records(path, limit)
    ]


def _time_s(path: Path, number: int, record: Mapping[str, Any]) -> float:
    value = record.get("t", record.get("timestamp"))
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or value < 0:
        raise UserError(f"{path}, line {number}: no arrival time in t (s) or timestamp (ms)")
    return float(value if "t" in record else value / 1000)


def _hash_ids(path: Path, number: int, record: Mapping[str, Any]) -> tuple[int, ...]:
    ids = record.get("hash_ids") or ()
    try:
        ids = json.loads(ids) if isinstance(ids, str) else ids
    except (ValueError, RecursionError):
        ids = None
    if not isinstance(ids, list | tuple) or not all(type(entry) is int for entry in ids):
        raise UserError(f"{path}, line {number}: hash_ids is no list of whole numbers")
    return tuple(ids)


def _azure(path: Path, limit: int | None) -> list[Arrival]:
    try:
        lines = unpacked(path).decode().splitlines()
    except UnicodeDecodeError as error:
        raise UserError(f"{path} is no text: {error.reason}") from error
    table = csv.reader(lines)
    try:
        return _azure_rows(path, table, limit)
    except csv.Error as error:
        line = table.line_num + 1
        raise UserError(f"{path}, line {line}: no line of a table: {error}") from None


def _azure_rows(path: Path, table: Any, limit: int | None) -> list[Arrival]:
    heading: list[str] = next(table, [])
    for column in AZURE_COLUMNS:
        if column not in heading:
            raise UserError(f"{path}, line 1: there is no column {column}")
    rows: list[Arrival] = []
    for cells in table:
        if limit is not None and len(rows) >= limit:
            break
        if cells:
            record = dict(zip(heading, cells, strict=False))
            rows.append(_azure_row(path, table.line_num, record))
    return rows


def _azure_row(path: Path, number: int, record: Mapping[str, str]) -> Arrival:
    time, *lengths = AZURE_COLUMNS
    try:
        at = datetime.fromisoformat(record[time].strip())
    except (KeyError, ValueError) as error:
        told = record.get(time)
        shown = repr(told)[:_MAX_SHOWN_CHARS]
        raise UserError(f"{path}, line {number}: {time} is {shown}: give a date") from error
    tokens = {}
    for key in lengths:
        told = record.get(key, "")
        is_number = told.strip().isdecimal() and len(told.strip()) <= _MAX_DIGITS
        tokens[key] = int(told) if is_number else told
    prompt, output = (length(path, number, tokens, key) for key in lengths)
    # Some of Azure's traces state the offset from UTC; others are in UTC and state none.
    return Arrival((at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp(), prompt, output)
