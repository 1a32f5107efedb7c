"""Entries of dataset files: prompts or only their lengths, output lengths, arrival times.

Formats, distinguished by file name and fields (each file may be compressed, ``.zst``):

    .csv    TIMESTAMP,ContextTokens,GeneratedTokens                            Azure LLM traces
    .json   one list of objects;  .jsonl  one object a line, of these kinds:
            input_length, output_length, optionally timestamp (ms) or t (s),
            and hash_ids (a number a block of the prompt, equal for equal prefixes)
                                                                 Mooncake and other traces
            conversations: [{"from": "human", "value": ...}, {"from": "gpt", "value": ...}]
                                                                 ShareGPT: the first question with
                                                                 its answer; left out without both
            prompt | question | text | instruction + input | context + input
            with output (text), or output_length or max_gen (tokens)
                                                                 Alpaca, LongBench, your own
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import msgspec

from banaserve.base.errors import UserError
from banaserve.base.text.records import read_records, unpacked
from banaserve.sim.trace import has_time, read_trace, time_s
from banaserve_bench.datasets.files import prompt_of, prompt_templates
from banaserve_bench.simulation.lengths import first_turns

_REQUIRED = {
    "alpaca": ("instruction",),
    "azure": ("t", "input_length", "output_length"),
    "mooncake": ("timestamp", "input_length", "output_length", "hash_ids"),
}
"""Required fields of the objects of named datasets, in addition to the checks of all datasets."""
_MAX_TOKENS = 10**9
_MAX_SHOWN_CHARS = 80


@dataclass(frozen=True, slots=True, kw_only=True)
class DatasetEntry:
    """A request as a dataset file describes it.

    Attributes:
        source: File and line, or the kind of made-up data.
        text: Prompt; None if only its length is known, which is then ``prompt_tokens``.
        output_text: Recorded answer; its token count is the output length if ``output_tokens`` is
            None.
        at_s: Arrival on the trace's own time axis, in seconds.
        block_ids: Ids of the prompt's blocks; entries with equal first ids share that prefix.
        shared_tokens: Number of first tokens that a made-up prompt shares with all prompts of the
            same ``shared_by``.
    """

    source: str
    text: str | None = None
    prompt_tokens: int | None = None
    output_text: str | None = None
    output_tokens: int | None = None
    at_s: float | None = None
    block_ids: tuple[int, ...] = ()
    shared_tokens: int = 0
    shared_by: str = ""


def read_entries(path: Path, kind: str | None = None) -> list[DatasetEntry]:
    """Read all entries of ``path`` in their order.

    Args:
        kind: Named dataset whose fields are required; None requires none of them.

    Raises:
        UserError: The file cannot be read, or an entry is wrong; the message names file, line and
            field.
    """
    found = list(_azure(path) if ".csv" in path.suffixes else _objects(path, kind))
    if not found:
        raise UserError(f"{path} holds no requests")
    return found


def _objects(path: Path, kind: str | None) -> Iterator[DatasetEntry]:
    templates = prompt_templates(path)
    is_list = path.name.removesuffix(".zst").endswith(".json")
    for number, record in _list(path) if is_list else read_records(path):
        where = f"{path}, {'object' if is_list else 'line'} {number}"
        for field in _REQUIRED.get(kind or "", ()):
            if field not in record:
                _refuse(where, field, f"is missing, and {kind} has it")
        source = f"{path.name}:{number}"
        if (turns := record.get("conversations")) is None:
            yield _entry(record, path, where, source, templates)
        elif all(texts := first_turns(where, turns)):
            yield DatasetEntry(source=source, text=texts[0], output_text=texts[1])


def _list(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    try:
        objects = msgspec.json.decode(unpacked(path), type=list[dict[str, Any]])
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise UserError(f"{path} is not a list of JSON objects: {error}") from error
    yield from enumerate(objects, start=1)


def _entry(
    record: Mapping[str, Any], path: Path, where: str, source: str, templates: Mapping[str, str]
) -> DatasetEntry:
    if "input_length" in record:
        return _traced(record, where, source)
    try:
        text = prompt_of(record, path, templates)
    except KeyError as error:
        raise UserError(f"{where}: {error.args[0]}") from error
    output = record.get("output")
    if output is not None and not isinstance(output, str):
        _refuse(where, "output", "is not a text")
    name = next((name for name in ("output_length", "max_gen") if name in record), None)
    length = _count(record, name, where) if name else None
    return DatasetEntry(source=source, text=text, output_text=output, output_tokens=length)


def _traced(record: Mapping[str, Any], where: str, source: str) -> DatasetEntry:
    ids = record.get("hash_ids", [])
    if not isinstance(ids, list) or not all(isinstance(one, int) for one in ids):
        _refuse(where, "hash_ids", "is not a list of whole numbers")
    return DatasetEntry(
        source=source,
        prompt_tokens=_count(record, "input_length", where),
        output_tokens=_count(record, "output_length", where),
        at_s=time_s(where, record) if has_time(record) else None,
        block_ids=tuple(ids),
    )


def _count(record: Mapping[str, Any], field: str, where: str) -> int:
    value = record.get(field)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= _MAX_TOKENS:
        _refuse(where, field, f"is {repr(value)[:_MAX_SHOWN_CHARS]}, not a number of tokens")
    return value


def _azure(path: Path) -> Iterator[DatasetEntry]:
    for number, row in enumerate(read_trace(path), start=1):
        yield DatasetEntry(
            source=f"{path.name}:{number}",
            prompt_tokens=row.prompt_tokens,
            output_tokens=row.output_tokens,
            at_s=row.at_s,
        )


def _refuse(where: str, field: str, why: str) -> NoReturn:
    raise UserError(f"{where}: the field {field} {why}")
