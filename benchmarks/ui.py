"""Cost of the page: its bytes, the CPU time of viewers, and the effect of these on streams.

``python -m benchmarks ui``. One server over a miniature model whose steps cost almost nothing, so
that only the front door is busy. CPU is that of the process that answers HTTP, as the system
accounts it; viewers are clients in this process that read the stream as fast as it arrives.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime
from pathlib import Path

import httpx
import numpy as np

from banaserve.base.arguments import Parser
from banaserve.base.errors import UserError
from banaserve.base.models import miniature
from banaserve.frontdoor.page.page import page_files
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.loops import closed_loop
from banaserve_bench.loadgen.servers import Server, banaserve_server, end_on_sigterm
from banaserve_bench.results import result
from banaserve_bench.statistics import paired_ratios, percentile

_NAME = "miniature"
_KEY = "of-this-benchmark"
_HEADERS = {"Authorization": f"Bearer {_KEY}"}
_CONTEXT_TOKENS = 1024
_VIEWERS = (0, 1, 5)
_MOST = _VIEWERS[-1]
_PROMPT_TOKENS, _OUTPUT_TOKENS = 32, 128
_PASSES = 5
"""Passes of each kind in a run, in turns: other load of the machine comes in waves of seconds."""
_OPTIONS = (
    *("--dtype", "float32", "--max-model-len", str(_CONTEXT_TOKENS)),
    *("--kv-cache-memory-bytes", str(256 << 20), "--kv-store-size", "256MiB"),
    *("--served-model-name", _NAME, "--admin-key", _KEY),
)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark and write the result; return the exit code."""
    parser = Parser(prog="python -m benchmarks ui", description=__doc__)
    parser.add_argument("--json", type=Path, help="write the result there")
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=15.0, help="of each look at the CPU")
    parser.add_argument("--streams", type=int, default=4, help="under way at once")
    parser.add_argument("--requests", type=int, default=24, help="of each of ten passes a run")
    parser.add_argument("--pd", default="1:1", help="instances, P:D")
    given = parser.parse_args(list(argv))
    end_on_sigterm()
    if given.runs < 1 or given.requests < 1:
        raise UserError("--runs and --requests: give 1 or more")
    record = asyncio.run(_measure(given, datetime.now(UTC)))
    result.deliver(record, given.json)
    return 0


async def _measure(given: argparse.Namespace, started_at: datetime) -> result.Result:
    tiny = miniature.Miniature(1, 2, 2, _CONTEXT_TOKENS)
    model = miniature.resolve(tiny, _NAME, None, lambda line: print(line, flush=True))
    cpu: dict[int, list[float]] = {count: [] for count in _VIEWERS}
    gaps: dict[int, list[float]] = {0: [], _MOST: []}
    first_s: list[float] = []
    with banaserve_server(model.path_or_id, "--pd", given.pd, *_OPTIONS) as server:
        await _pass(server, given, 0)
        for run in range(1, given.runs + 1):
            print(f"run {run} of {given.runs}", flush=True)
            counts = _VIEWERS if run % 2 else _VIEWERS[::-1]
            for count in counts:
                async with _watching(server, count):
                    cpu[count].append(await _idle_cpu_fraction(server, given.seconds))
            found: dict[int, list[float]] = {count: [] for count in gaps}
            for turn in range(2 * _PASSES):
                count = _MOST if (turn + run) % 2 else 0
                async with _watching(server, count):
                    found[count] += await _pass(server, given, turn)
            for count, of_run in found.items():
                gaps[count].append(percentile(of_run, 99))
            first_s.append(await _first_snapshot_s(server))
    return _result(given, started_at, cpu, gaps, first_s)


@contextlib.asynccontextmanager
async def _watching(server: Server, count: int) -> AsyncIterator[None]:
    """Run ``count`` viewers, all of which have received a picture."""
    started = [asyncio.Event() for _ in range(count)]
    viewers = [asyncio.create_task(_watch(server, one)) for one in started]
    try:
        async with asyncio.timeout(30):
            for one in started:
                await one.wait()
        yield
    finally:
        for viewer in viewers:
            viewer.cancel()
        await asyncio.gather(*viewers, return_exceptions=True)


async def _watch(server: Server, started: asyncio.Event) -> None:
    async with (
        httpx.AsyncClient(timeout=None) as client,
        client.stream("GET", f"{server.url}/admin/live", headers=_HEADERS) as answer,
    ):
        if answer.status_code != 200:
            raise UserError(f"the stream is answered {answer.status_code}")
        async for line in answer.aiter_lines():
            if line == "event: snapshot":
                started.set()


async def _idle_cpu_fraction(server: Server, seconds: float) -> float:
    """Return the share of one core that the front door takes while it has no requests."""
    before_s, began_s = server.front_cpu_s(), time.monotonic()
    await asyncio.sleep(seconds)
    return (server.front_cpu_s() - before_s) / (time.monotonic() - began_s)


async def _pass(server: Server, given: argparse.Namespace, seed: int) -> list[float]:
    """Return the gaps between events with text, of all streams."""
    draws = np.random.default_rng(seed)
    calls = [
        CompletionCall(
            f"{number}",
            prompt=[int(one) for one in draws.integers(100, 40_000, _PROMPT_TOKENS)],
            max_tokens=_OUTPUT_TOKENS,
            extra={"ignore_eos": True},
        )
        for number in range(given.requests)
    ]
    async with OpenAiClient(server.url, _NAME) as client:
        records = await closed_loop(client, calls, given.streams)
    return [gap for record in records for gap in record.checked().gaps_s]


async def _first_snapshot_s(server: Server) -> float:
    """Return the time from asking for the page to the first picture: all files, then the stream."""
    began_s = time.monotonic()
    async with httpx.AsyncClient(timeout=30) as client:
        for name in ("", "page.json", *page_files()):
            (await client.get(f"{server.url}/ui/{name}")).raise_for_status()
        async with client.stream("GET", f"{server.url}/admin/live", headers=_HEADERS) as answer:
            async for line in answer.aiter_lines():
                if line == "event: snapshot":
                    return time.monotonic() - began_s
    raise UserError("the stream ended before its first picture")


def _result(
    given: argparse.Namespace,
    started_at: datetime,
    cpu: dict[int, list[float]],
    gaps: dict[int, list[float]],
    first_s: list[float],
) -> result.Result:
    num_bytes = sum(len(file.body) for file in page_files().values())
    added = [most - none for most, none in zip(cpu[_MOST], cpu[0], strict=True)]
    figures = {
        "page_bytes": result.figure([num_bytes], "bytes"),
        "first_picture": result.figure(first_s, "s"),
        **{f"cpu_{count}_viewers": result.figure(cpu[count], "ratio") for count in _VIEWERS},
        f"cpu_added_by_{_MOST}": result.figure(added, "ratio"),
        "gap_p99_without": result.figure(gaps[0], "s"),
        f"gap_p99_with_{_MOST}": result.figure(gaps[_MOST], "s"),
        f"gap_p99_ratio_{_MOST}": result.figure(paired_ratios(gaps[_MOST], gaps[0]), "ratio"),
    }
    return result.result(
        "ui",
        seed=0,
        options={
            "runs": given.runs,
            "seconds": given.seconds,
            "streams": given.streams,
            "requests": given.requests,
            "pd": given.pd,
        },
        started_at=started_at,
        figures=figures,
        notes=[
            "page_bytes: of all files, as they are sent, without compression",
            "first_picture: every file and the first snapshot, one after the other, without the "
            "drawing of a browser",
            "cpu: share of one core that the front door's process takes without requests; "
            f"added: with {_MOST} viewers less with none, run by run",
            f"gap_p99: between events with text of {given.streams} streams, over {_PASSES} passes "
            "with and as many without viewers by turns; the viewers, which run in the client's "
            "process, share the machine",
        ],
    )
