"""Rounds of ``bench migration``: one stream decodes while something moves away and comes back."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from banaserve.api.admin_client import AdminClient
from banaserve.bench.client import Call, OpenAiClient
from banaserve.bench.record import RequestRecord
from banaserve.bench.statistics import median
from banaserve.bench.transport_speed import write_bytes_per_s
from banaserve.engine.vllm.migration.api import Ask, Migration, MoveHeads, MoveLayers, Return
from banaserve.errors import UserError

WINDOW_S = 1.0
_TRANSPORT = "shm"


class Case(NamedTuple):
    """What moves."""

    name: str
    ask: Ask


def layers(count: int, precopy: bool = True) -> Case:
    first = (30 - count) // 2
    name = f"layers_{count}" if precopy else f"stop_and_copy_{count}"
    return Case(name, MoveLayers("d0", "p0", (first, first + count), precopy=precopy))


def heads(count: int) -> Case:
    return Case(f"heads_{count}", MoveHeads("d0", "p0", {5: tuple(range(1, 1 + count))}))


@dataclass
class Round:
    """One move away and back; times on the client's clock."""

    away: Migration
    home: Migration
    calm_from_s: float
    began_s: float
    ended_s: float
    away_until_s: float
    transport_bytes_per_s: float


@dataclass
class Rounds:
    """All rounds of one case, and the stream that ran beside them."""

    case: Case
    record: RequestRecord
    rounds: list[Round] = field(default_factory=list)


@contextlib.asynccontextmanager
async def stream(
    client: OpenAiClient, prompt: Sequence[int], max_tokens: int
) -> AsyncIterator[RequestRecord]:
    """One stream that decodes while the block runs; cancelled at its end.

    Raises:
        UserError: It has ended before the block did.
    """
    call = Call("stream", list(prompt), max_tokens=max_tokens, extra={"ignore_eos": True})
    record = RequestRecord(id=call.id, sent_at_s=client.clock.now())
    task = asyncio.create_task(client.send_into(call, record))
    try:
        while len(record.token_at_s) < 10:
            if task.done():
                raise UserError(f"the stream has ended: {record.error}")
            await asyncio.sleep(0.02)
        yield record
        if task.done():
            raise UserError(f"the stream has ended too early: {record.error or 'no more room'}")
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def run_round(client: OpenAiClient, admin: AdminClient, case: Case) -> Round:
    """A calm window, the move, a window away, and back."""
    now = client.clock.now
    calm_from_s = now()
    await asyncio.sleep(WINDOW_S)
    began_s = now()
    away = await _done(admin, case.ask)
    ended_s = now()
    await asyncio.sleep(WINDOW_S)
    away_until_s = now()
    page_bytes, copied = _copied(away)
    speed = await asyncio.to_thread(write_bytes_per_s, _TRANSPORT, page_bytes, copied)
    home = await _done(admin, Return("d0"))
    return Round(away, home, calm_from_s, began_s, ended_s, away_until_s, speed)


async def _done(admin: AdminClient, ask: Ask) -> Migration:
    migration = await asyncio.to_thread(admin.run, ask)
    if migration.state != "done":
        raise UserError(f"{migration.kind} {migration.state}: {migration.error}")
    return migration


def _copied(migration: Migration) -> tuple[int, int]:
    """Bytes of one run, and of all: what the transport is asked to copy for comparison."""
    facts = migration.moves[0].facts
    total = int(facts.get("precopy_bytes", 0) + facts.get("commit_bytes", 0))
    return min(total, 196_608), max(total, 1 << 24)


def figures_of(done: Rounds) -> dict[str, tuple[list[float], str]]:
    """Samples by name, one a round."""
    times_s = done.record.token_at_s
    found: dict[str, tuple[list[float], str]] = {}

    def add(name: str, unit: str, value: float | None) -> None:
        if value is not None:
            found.setdefault(name, ([], unit))[0].append(value)

    for one in done.rounds:
        facts = one.away.moves[0].facts
        seconds = one.away.moves[0].seconds
        before_s = median(_gaps(times_s, one.calm_from_s, one.began_s))
        after_s = median(_gaps(times_s, one.ended_s, one.away_until_s))
        copied = facts.get("precopy_bytes", 0) + facts.get("commit_bytes", 0)
        add("bytes", "B", copied)
        add("weight_bytes", "B", facts.get("weight_bytes", 0))
        add("stall", "ms", 1e3 * facts["stall_s"])
        add("stall_copy", "ms", 1e3 * facts["copy_s"])
        add("commit_bytes", "B", facts["commit_bytes"])
        for phase, spent_s in seconds.items():
            add(f"{phase}_time", "s", spent_s)
        add("gap_ratio", "ratio", max(_gaps(times_s, one.began_s, one.ended_s)) / before_s)
        add("gap_ratio_calm", "ratio", max(_gaps(times_s, one.calm_from_s, one.began_s)) / before_s)
        add("host_step_ratio", "ratio", after_s / before_s)
        add("step_before", "ms", 1e3 * before_s)
        add("step_after", "ms", 1e3 * after_s)
        add("bandwidth_fraction", "fraction", _bandwidth_fraction(facts, one))
        add("transport_speed", "B/s", one.transport_bytes_per_s)
        if facts.get("predicted_bytes"):
            add("freed", "B", facts["freed_bytes"])
            add("freed_fraction", "fraction", facts["freed_bytes"] / facts["predicted_bytes"])
        add("blocks_gained", "blocks", one.away.blocks_gained)
        add("return_stall", "ms", 1e3 * one.home.moves[0].facts["stall_s"])
    return found


def _bandwidth_fraction(facts: dict[str, Any], one: Round) -> float | None:
    """Of the copies' speed while the engine serves, against the transport's alone."""
    if not facts.get("precopy_s"):
        return None
    return float(facts["precopy_bytes"] / facts["precopy_s"] / one.transport_bytes_per_s)


def _gaps(times_s: Sequence[float], from_s: float, to_s: float) -> list[float]:
    """Between two tokens, of those that overlap the window."""
    pairs = itertools.pairwise(times_s)
    found = [later - earlier for earlier, later in pairs if earlier < to_s and later > from_s]
    if not found:
        raise UserError("the stream stood still in a whole window: nothing to compare")
    return found
