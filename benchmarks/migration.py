"""Time and memory of moving layers and heads between instances.

``python -m benchmarks migration``. One stream decodes on d0 while layers or heads of d0 move to p0
and back, repeatedly, with a short and a long context; for each move the same transport also copies
as many bytes alone, which bounds the speed. Then a batch runs on a pool that is too small for it,
before and after layers have moved away.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import itertools
import random
import secrets
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from banaserve.base import models
from banaserve.base.arguments import positive
from banaserve.base.errors import UserError
from banaserve.base.tasks import end_tasks
from banaserve.contracts.migration_api import (
    Migration,
    MigrationRequest,
    MoveHeads,
    MoveLayers,
    Return,
)
from banaserve.frontdoor.admin_client import AdminClient
from banaserve.transport.interface import TransportOptions
from banaserve.transport.memory import Memory
from banaserve.transport.regions.descriptor import Offsets
from banaserve.transport.regions.remote_region import RemoteRegion
from banaserve.transport.registry import create
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient, RequestRecord
from banaserve_bench.loadgen.servers import Server
from banaserve_bench.results.statistics import median
from benchmarks.measurement import (
    Measurement,
    Samples,
    administered_server,
    parser_of,
    progress_of,
    random_tokens,
)

_FLOAT32 = ("--pd", "1:1", "--dtype", "float32")
_POOL_BYTES = 768 << 20
_SMALL_POOL_BLOCKS = 24
_BLOCK_BYTES = 30 * 128 * 2 * 3 * 64 * 4
WINDOW_S = 1.0
_LOOK_S = 0.5
"""Interval between samples, in seconds: each page of metrics is a load on two cores."""
_TRANSPORT = "shm"
_TIMEOUT_S = 60.0
_PAGES_A_TIME = 320
"""Number of pages of a KV cache, about as many as a move copies in one submission."""
_REPEATS = 5
_NOTES = (
    "CASE.CONTEXT.FIGURE: one stream with CONTEXT tokens decodes on d0 while CASE moves "
    "to p0 and back; one sample a round trip",
    "gap_ratio: longest gap between two tokens from the request to move until its end, "
    "against the median gap in the second before; gap_ratio_calm: the longest gap of those",
    "host_step_ratio: median gap while the case is away against the one before",
    "bandwidth_fraction: copies while the engine serves against the same transport and "
    "page size alone, measured right after while the stream goes on",
    "stop_and_copy: the same move without copying ahead",
    "batch: requests at once on a pool of 24 blocks, before and after 10 of 30 layers of "
    "d0 run beside p0; all prompts are in the store",
)


class MigrationCase(NamedTuple):
    """A request that moves layers or heads, with its name."""

    name: str
    ask: MigrationRequest


def layers(count: int, precopy: bool = True) -> MigrationCase:
    first = (30 - count) // 2
    name = f"layers_{count}" if precopy else f"stop_and_copy_{count}"
    return MigrationCase(name, MoveLayers("d0", "p0", (first, first + count), precopy=precopy))


def heads(count: int) -> MigrationCase:
    return MigrationCase(f"heads_{count}", MoveHeads("d0", "p0", {5: tuple(range(1, 1 + count))}))


_CASES = (
    layers(1),
    layers(5),
    layers(10),
    layers(20),
    heads(1),
    heads(2),
    layers(10, precopy=False),
)
_CASES_AGAIN = ("layers_10", "layers_20", "heads_2", "stop_and_copy_10")
"""Cases for every context after the first: those that its length may affect."""


def main(argv: Sequence[str]) -> int:
    given = _parse(argv)
    measurement = Measurement("migration", given)
    measurement.deliver(measurement.result(asyncio.run(_measure(given)), _NOTES))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("migration", __doc__)
    add = parser.add_argument
    add("--runs", type=positive, default=5, help="of each case")
    add(
        "--contexts",
        type=int,
        nargs="*",
        default=[1000, 6000],
        metavar="TOKENS",
        help="of the stream while things move; none: only the batch",
    )
    add(
        "--cases",
        nargs="+",
        metavar="NAME",
        help=f"default: all with the first context, {', '.join(_CASES_AGAIN)} with the others",
    )
    add("--batch-requests", type=int, default=8, help="of the batch on a small pool; 0: none")
    add("--batch-prompt-tokens", type=int, default=389, help="which the store holds but for a few")
    add("--batch-output-tokens", type=int, default=192, help="enough to need one block more")
    add("--batch-runs", type=int, default=3, help="of the batch, before and after each")
    add("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    known = {case.name for case in _CASES}
    if unknown := [name for name in given.cases or () if name not in known]:
        raise UserError(f"--cases {unknown[0]}: one of {', '.join(sorted(known))}")
    return given


async def _measure(given: argparse.Namespace) -> Samples:
    plan = [(context, _cases(given, number)) for number, context in enumerate(given.contexts)]
    samples: Samples = {}
    total = sum(len(cases) for _, cases in plan) * given.runs
    total += (2 * given.batch_runs + 1) * bool(given.batch_requests)
    with progress_of(total, "starting") as advance:
        for context, cases in plan:
            samples |= await _context(given, context, cases, advance)
        if given.batch_requests:
            samples |= await _batches(given, advance)
    return samples


def _cases(given: argparse.Namespace, number: int) -> list[MigrationCase]:
    """Return the cases to measure with the context of this number."""
    names = given.cases or (_CASES_AGAIN if number else [case.name for case in _CASES])
    return [case for case in _CASES if case.name in names]


def _prompts(count: int, num_tokens: int, seed: int) -> list[list[int]]:
    draws = random.Random(seed)
    return [random_tokens(draws, num_tokens) for _ in range(count)]


async def _context(
    given: argparse.Namespace,
    context: int,
    cases: Sequence[MigrationCase],
    advance: Callable[[str], None],
) -> Samples:
    prompt = _prompts(1, context, given.seed)[0]
    options = (*_FLOAT32, "--kv-cache-memory-bytes", str(_POOL_BYTES))
    samples: Samples = {}
    with administered_server(models.PACKAGED, *options) as (server, admin, _):
        async with OpenAiClient(server.url, models.PACKAGED, return_token_ids=True) as client:
            for case in cases:
                found = await _rounds(given, client, admin, prompt, case, advance)
                for name, sample in found.items():
                    samples[f"{case.name}.{context}.{name}"] = sample
    return samples


async def _rounds(
    given: argparse.Namespace,
    client: OpenAiClient,
    admin: AdminClient,
    prompt: Sequence[int],
    case: MigrationCase,
    advance: Callable[[str], None],
) -> Samples:
    async with stream(client, prompt, 8000 - len(prompt)) as record:
        rounds = []
        for _ in range(given.runs):
            rounds.append(await run_round(client, admin, case))
            advance(f"{case.name} with {len(prompt)} tokens")
    return figures_of(rounds, record.token_at_s)


@dataclass
class Round:
    """A move away and back; times on the client's clock."""

    away: Migration
    home: Migration
    calm_from_s: float
    began_s: float
    ended_s: float
    away_until_s: float
    transport_bytes_per_s: float


@contextlib.asynccontextmanager
async def stream(
    client: OpenAiClient, prompt: Sequence[int], max_tokens: int
) -> AsyncIterator[RequestRecord]:
    """Decode one stream while the block runs; cancel it at the end of the block.

    Raises:
        UserError: The stream ended before the block.
    """
    call = CompletionCall.exact("stream", list(prompt), max_tokens)
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
        await end_tasks(task)


async def run_round(client: OpenAiClient, admin: AdminClient, case: MigrationCase) -> Round:
    """Run a calm window, the move, a window with modules away, and the return."""
    now = client.clock.now
    calm_from_s = now()
    await asyncio.sleep(WINDOW_S)
    began_s = now()
    away = await done(admin, case.ask)
    ended_s = now()
    await asyncio.sleep(WINDOW_S)
    away_until_s = now()
    page_bytes, copied = _copied(away)
    speed = await asyncio.to_thread(write_bytes_per_s, _TRANSPORT, page_bytes, copied)
    home = await done(admin, Return("d0"))
    return Round(away, home, calm_from_s, began_s, ended_s, away_until_s, speed)


async def done(admin: AdminClient, ask: MigrationRequest) -> Migration:
    """Carry out a move and return its final state.

    Raises:
        UserError: The move is refused, or has failed.
    """
    migration = await asyncio.to_thread(admin.run, ask)
    if migration.state != "done":
        raise UserError(f"{migration.kind} {migration.state}: {migration.error}")
    return migration


def _copied(migration: Migration) -> tuple[int, int]:
    """Return the bytes of a page and of all pages, for the transport to copy in comparison."""
    facts = migration.moves[0].facts
    total = int(facts.get("precopy_bytes", 0) + facts.get("commit_bytes", 0))
    return min(total, 196_608), max(total, 1 << 24)


def write_bytes_per_s(name: str, page_bytes: int, total_bytes: int) -> float:
    """Return the speed of copying ``total_bytes`` in pages to a region whose memory is present.

    Both ends are in this process; the bytes take the same way as between two processes. The speed
    is that of the median of ``_REPEATS`` copies, since a single one depends on other work of the
    machine.
    """
    num_pages = max(1, total_bytes // page_bytes)
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        options = TransportOptions(folder=folder, secret=secrets.token_bytes(32))
        here, there = create(name, options), create(name, options)
        try:
            offered = there.offer(num_pages * page_bytes, 1)
            region = here.open(offered.descriptor, _TIMEOUT_S)
            region.warm(0, num_pages * page_bytes)
            local = np.ones(num_pages * page_bytes, np.uint8)
            offsets = np.arange(num_pages, dtype=np.int64) * page_bytes
            taken_s = [
                _copy_s(region, Memory.of(local), offsets, page_bytes) for _ in range(_REPEATS)
            ]
            return num_pages * page_bytes / median(taken_s)
        finally:
            here.close()
            there.close()


def _copy_s(region: RemoteRegion, local: Memory, offsets: Offsets, page_bytes: int) -> float:
    began_s = time.perf_counter()
    parts = [
        offsets[first : first + _PAGES_A_TIME] for first in range(0, len(offsets), _PAGES_A_TIME)
    ]
    tickets = [region.submit_write(local, part, part, page_bytes, 1) for part in parts]
    for ticket in tickets:
        ticket.wait(_TIMEOUT_S)
    return time.perf_counter() - began_s


def figures_of(rounds: Sequence[Round], times_s: Sequence[float]) -> Samples:
    """Return samples by name, one for each round.

    Args:
        times_s: Arrival of each token of the stream, on the client's clock.
    """
    found: Samples = {}

    def add(name: str, unit: str, value: float | None) -> None:
        if value is not None:
            found.setdefault(name, ([], unit))[0].append(value)

    for one in rounds:
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
    """Return the speed of copies while the engine serves, over that of the transport alone."""
    if not facts.get("precopy_s"):
        return None
    return float(facts["precopy_bytes"] / facts["precopy_s"] / one.transport_bytes_per_s)


def _gaps(times_s: Sequence[float], from_s: float, to_s: float) -> list[float]:
    """Return the gaps between two tokens that overlap the window."""
    pairs = itertools.pairwise(times_s)
    found = [later - earlier for earlier, later in pairs if earlier < to_s and later > from_s]
    if not found:
        raise UserError("the stream stood still in a whole window: nothing to compare")
    return found


async def _batches(given: argparse.Namespace, advance: Callable[[str], None]) -> Samples:
    prompts = _prompts(given.batch_requests, given.batch_prompt_tokens, given.seed + 1)
    pool = ("--kv-cache-memory-bytes", str(_SMALL_POOL_BLOCKS * _BLOCK_BYTES + (1 << 20)))
    length = given.batch_prompt_tokens + given.batch_output_tokens
    options = (*_FLOAT32, *pool, "--max-model-len", str(length + 64))
    passes: dict[str, list[BatchRun]] = {"before": [], "after": []}
    with administered_server(models.PACKAGED, *options) as (server, admin, _):
        async with OpenAiClient(server.url, models.PACKAGED, return_token_ids=True) as client:

            async def run() -> BatchRun:
                tokens = given.batch_output_tokens
                return await run_batch(server, admin, client, prompts, tokens)

            await run()  # so that the store holds every prompt
            advance("a batch on a small pool")
            for _ in range(given.batch_runs):
                if passes["after"]:
                    await done(admin, Return("d0"))
                passes["before"].append(await run())
                advance("a batch on a small pool")
                await done(admin, MoveLayers("d0", "p0", (10, 20)))
                passes["after"].append(await run())
                advance("the same with ten layers away")
    return _batch_samples(passes["before"], passes["after"])


@dataclass(frozen=True)
class BatchRun:
    """Results of one pass of all requests.

    Attributes:
        running: Mean number of requests in the running batch, while any ran.
        preemptions: Number of preemptions during the pass.
    """

    tokens_per_s: float
    running: float
    preemptions: float
    num_blocks: int
    token_ids: list[list[int]]


async def run_batch(
    server: Server,
    admin: AdminClient,
    client: OpenAiClient,
    prompts: Sequence[list[int]],
    output_tokens: int,
) -> BatchRun:
    """Send all prompts at once and wait for all answers."""
    calls = CompletionCall.numbered(prompts, output_tokens)
    metric = partial(server.metric, instance_id="d0")
    preempted = metric("vllm:num_preemptions_total")
    began_s = client.clock.now()
    sending = asyncio.gather(*(client.send(call) for call in calls))
    seen: list[float] = []
    while not sending.done():
        seen.append(await asyncio.to_thread(metric, "vllm:num_requests_running"))
        await asyncio.sleep(_LOOK_S)
    seconds = client.clock.now() - began_s
    records = [one.checked() for one in await sending]
    placed = await asyncio.to_thread(admin.placement)
    (host,) = [one for one in placed.instances if one.id == "d0"]
    busy = [number for number in seen if number] or [0.0]
    return BatchRun(
        tokens_per_s=len(calls) * output_tokens / seconds,
        running=sum(busy) / len(busy),
        preemptions=metric("vllm:num_preemptions_total") - preempted,
        num_blocks=host.num_blocks,
        token_ids=[record.token_ids for record in records],
    )


def _batch_samples(before: Sequence[BatchRun], after: Sequence[BatchRun]) -> Samples:
    samples: Samples = {}
    for when, batches in (("before", before), ("after", after)):
        samples[f"batch.tokens_{when}"] = [b.tokens_per_s for b in batches], "tokens/s"
        samples[f"batch.running_{when}"] = [b.running for b in batches], "requests"
        samples[f"batch.preemptions_{when}"] = [b.preemptions for b in batches], "requests"
        samples[f"batch.pool_{when}"] = [float(b.num_blocks) for b in batches], "blocks"
    pairs = list(zip(before, after, strict=True))
    samples["batch.tokens_ratio"] = [a.tokens_per_s / b.tokens_per_s for b, a in pairs], "ratio"
    samples["batch.running_ratio"] = [a.running / b.running for b, a in pairs], "ratio"
    equal = [float(b.token_ids == a.token_ids) for b, a in pairs]
    samples["batch.equal_answers_fraction"] = equal, "fraction"
    return samples
