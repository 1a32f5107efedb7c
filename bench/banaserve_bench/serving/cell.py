"""One cell of a serving run: one rate, one seed, one server."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import IO, NamedTuple, Self

import msgspec

from banaserve.base.errors import UserError
from banaserve_bench.datasets.items import Item
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from banaserve_bench.loadgen.loops import INTERRUPTED, closed_loop, open_loop


class CellId(NamedTuple):
    """Identity of a cell.

    Attributes:
        load: Requests a second, or with ``is_closed`` the number of requests in progress; None for
            a trace at its own speed.
    """

    load: float | None
    seed: int
    is_closed: bool = False

    @property
    def load_name(self) -> str:
        if self.load is None:
            return "trace"
        return f"{self.load:g}" + ("_at_once" if self.is_closed else "rps")

    @property
    def name(self) -> str:
        return f"{self.load_name}-seed{self.seed}"


class Sent(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    """Line of a cell's file: a request and its outcome.

    Attributes:
        is_warm_up: True if sent before the measured time began; such a request counts in no figure.
        prompt_tokens: Number of prompt tokens as requested; the server's own count is in
            ``record``.
        record: Record of the request; its times count from the start of the cell.
    """

    is_warm_up: bool
    source: str
    prompt_tokens: int
    output_tokens: int
    is_cut: bool
    record: RequestRecord


class CellFile:
    """The records of one cell as JSON lines, written as requests end.

    The file is called ``*.part.jsonl`` until the cell is complete; the file of a stopped run keeps
    that name and is no part of any result.
    """

    def __init__(self, folder: Path, cell: CellId) -> None:
        self._part = folder / f"{cell.name}.part.jsonl"
        self._whole = folder / f"{cell.name}.jsonl"
        self._file: IO[bytes] | None = None

    def __enter__(self) -> Self:
        try:
            self._part.parent.mkdir(parents=True, exist_ok=True)
            self._file = self._part.open("wb")
        except OSError as error:
            raise UserError(f"cannot write {self._part}: {error.strerror}") from error
        return self

    def add(self, sent: Sent) -> None:
        assert self._file is not None
        self._file.write(msgspec.json.encode(sent) + b"\n")
        self._file.flush()

    def __exit__(self, *exception: object) -> None:
        if self._file is not None:
            self._file.close()
        if exception[0] is None:
            self._part.replace(self._whole)


Ended = Callable[[int, int], None]
"""Receiver of the number of requests that have ended, and of the failed ones among them."""


async def run_cell(
    client: OpenAiClient,
    items: Sequence[Item],
    arrivals_s: Sequence[float] | None,
    *,
    cell: CellId,
    warm_up_s: float,
    exact_output: bool,
    keep: CellFile,
    ended: Ended,
) -> tuple[list[Sent], float]:
    """Send ``items`` and record the outcome of each; return when all have ended.

    Args:
        arrivals_s: Arrival times in seconds from the start; None keeps ``cell.load`` requests in
            progress instead.
        exact_output: True to ask for exactly the wanted number of tokens (ignore_eos, min_tokens).

    Returns:
        The requests in their order, and CPU seconds of this process for each second of the cell,
        for all its work, on the machine's clock whatever the client's clock is.
    """
    calls = [_call(number, item, exact_output) for number, item in enumerate(items)]
    by_id = dict(zip((call.id for call in calls), items, strict=True))
    start_s = client.clock.now()
    found: dict[str, Sent] = {}
    num_failed = 0

    def on_record(record: RequestRecord) -> None:
        nonlocal num_failed
        sent = _sent(record, by_id[record.id], start_s, warm_up_s)
        found[record.id] = sent
        num_failed += record.error is not None
        keep.add(sent)
        if record.error != INTERRUPTED:
            ended(len(found), num_failed)

    began_cpu_s, began_s = time.process_time(), time.monotonic()
    try:
        if arrivals_s is None:
            await closed_loop(client, calls, int(cell.load or 1), on_record)
        else:
            await open_loop(client, calls, arrivals_s, on_record)
    except ExceptionGroup as failed:  # of the loop's tasks: a record cannot be written
        raise failed.exceptions[0] from failed
    cpu_s = time.process_time() - began_cpu_s
    return [found[call.id] for call in calls], cpu_s / (time.monotonic() - began_s)


def _call(number: int, item: Item, exact_output: bool) -> CompletionCall:
    exact = {"ignore_eos": True, "min_tokens": item.output_tokens} if exact_output else {}
    return CompletionCall(
        f"r{number}", prompt=item.prompt, max_tokens=item.output_tokens, extra=exact
    )


def _sent(record: RequestRecord, item: Item, start_s: float, warm_up_s: float) -> Sent:
    """Make the record's times relative to the start of the cell, and drop its text."""
    for name in ("due_at_s", "sent_at_s", "first_token_at_s", "ended_at_s"):
        value = getattr(record, name)
        if value is not None:
            setattr(record, name, round(value - start_s, 6))
    record.token_at_s = [round(at_s - start_s, 6) for at_s in record.token_at_s]
    record.text = ""
    return Sent(
        is_warm_up=record.arrival_s < warm_up_s,
        source=item.source,
        prompt_tokens=item.prompt_tokens,
        output_tokens=item.output_tokens,
        is_cut=item.is_cut,
        record=record,
    )
