"""Spans of requests compared with their latency at the client.

``python -m benchmarks timeline``. A server with prefill and decode apart sends its spans to an OTLP
receiver in this process. Each request has a trace context of its own, by which its spans are found.
The accounted share is the time that the consecutive parts of a request cover, without the spans
below them, over the client's time from sending the request to the last byte.
"""

from __future__ import annotations

import argparse
import asyncio
import random
import time
from collections.abc import Sequence
from typing import NamedTuple

import httpx
from rich.progress import Progress

from banaserve.base import models
from banaserve.base.arguments import positive
from banaserve.serving.tracing.spans import SpanName
from banaserve_bench.loadgen.servers import banaserve_server
from banaserve_bench.results.statistics import median
from benchmarks.drivers.otlp_receiver import OtlpReceiver, ReceivedSpan
from benchmarks.measurement import Measurement, Samples, model_of, parser_of, random_tokens

_OF_REQUEST = (
    *(SpanName.RECEIVE, SpanName.PREPARE, SpanName.ROUTE, SpanName.WAIT, SpanName.QUEUE),
    *(SpanName.PREFILL, SpanName.HAND_OVER, SpanName.DECODE, SpanName.RESPOND),
)
_SERVE = ("--pd", "1:1", "--dtype", "float32", "--kv-cache-memory-bytes", str(512 << 20))
_SERVER_KIND = 2
_WARM_UP = 4
_WITHIN = 0.02
_NOTES = (
    "a sample is a request, not a run",
    "accounted: seconds of the parts that follow each other over the latency at the "
    "client, from sending the request to the last byte of its stream; spans below them do "
    "not count; unaccounted: the difference",
    "server: the server's own span over that latency",
    "complete: both engines told what they had noted; spans_lost: failed or dropped",
)


class TimelineSample(NamedTuple):
    """Times of one request.

    Attributes:
        latency_s: Latency at the client.
        server_s: Duration of the server's span.
        parts_s: Durations by name, of parts that follow each other.
        is_complete: True if all processes have told their notes.
    """

    latency_s: float
    server_s: float
    parts_s: dict[str, float]
    is_complete: bool

    @property
    def accounted(self) -> float:
        """Share of the latency that the parts account for, in [0, 1] if clocks agree."""
        return sum(self.parts_s.values()) / self.latency_s

    @property
    def unaccounted_s(self) -> float:
        """Time outside the parts: the client's own, and the way to the server."""
        return self.latency_s - sum(self.parts_s.values())


def main(argv: Sequence[str]) -> int:
    """Run it, print the figure and write the result; return 1 if the spans miss the 2% goal."""
    parser = parser_of("timeline", __doc__)
    add = parser.add_argument
    add("--model", default=models.PACKAGED)
    add("--requests", type=positive, default=200)
    add("--at-once", type=positive, default=2, help="requests under way")
    add("--prompt-tokens", type=positive, nargs=2, default=[64, 384], metavar="N")
    add("--output-tokens", type=positive, nargs=2, default=[8, 24], metavar="N")
    add("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    measurement = Measurement("timeline", given)
    samples, dropped = asyncio.run(_measure(given))
    record = measurement.result(_figures(samples, dropped), _NOTES)
    measurement.deliver(record)
    print(_words(samples))
    return 0 if abs(1 - record.figures["accounted"].median) <= _WITHIN else 1


def _words(samples: Sequence[TimelineSample]) -> str:
    """Return the figure in a line."""
    shares = [one.accounted for one in samples]
    worst = max(shares, key=lambda share: abs(1 - share))
    missed = max(samples, key=lambda one: abs(one.unaccounted_s))
    return (
        f"spans account for {100 * median(shares):.2f}% of the latency (median), "
        f"{100 * worst:.2f}% (worst; {1e3 * missed.unaccounted_s:.0f} ms at most), within 2% on "
        f"{sum(abs(1 - share) <= _WITHIN for share in shares)} of {len(samples)} requests; "
        f"{sum(one.is_complete for one in samples)} with the notes of all processes"
    )


async def _measure(given: argparse.Namespace) -> tuple[list[TimelineSample], float]:
    """Return the samples, and the number of spans that were lost."""
    draws, samples = random.Random(given.seed), []
    name = model_of(given.model).served_name
    receiver = OtlpReceiver()
    try:
        with (
            Progress(transient=True) as progress,
            banaserve_server(
                given.model, *_SERVE, "--otlp-traces-endpoint", receiver.url
            ) as server,
        ):
            task = progress.add_task("requests", total=given.requests)
            async with httpx.AsyncClient(base_url=server.url, timeout=120) as client:
                for _ in range(_WARM_UP):
                    await _ask(client, name, given, draws)
                at_once = asyncio.Semaphore(given.at_once)

                async def one() -> tuple[str, float]:
                    async with at_once:
                        asked = await _ask(client, name, given, draws)
                    progress.update(task, advance=1)
                    return asked

                asked = await asyncio.gather(*(one() for _ in range(given.requests)))
            for trace_id, latency_s in asked:
                spans = await asyncio.to_thread(receiver.trace, trace_id)
                samples.append(sample_of(spans, latency_s))
            dropped = sum(
                server.metric("banaserve_trace_spans_total", outcome=outcome)
                for outcome in ("failed", "dropped")
            )
    finally:
        receiver.stop()
    return samples, dropped


async def _ask(
    client: httpx.AsyncClient, model: str, given: argparse.Namespace, draws: random.Random
) -> tuple[str, float]:
    """Stream one request; return the id of its trace and its latency in seconds."""
    trace_id = f"{draws.getrandbits(128) | 1:032x}"
    prompt = random_tokens(draws, draws.randint(*given.prompt_tokens))
    body = {
        "model": model,
        "prompt": prompt,
        "max_tokens": draws.randint(*given.output_tokens),
        "ignore_eos": True,
        "temperature": 0.0,
        "stream": True,
    }
    headers = {"traceparent": f"00-{trace_id}-{draws.getrandbits(64) | 1:016x}-01"}
    began_s = time.perf_counter()
    async with client.stream("POST", "/v1/completions", json=body, headers=headers) as answer:
        answer.raise_for_status()
        async for _ in answer.aiter_raw():
            ended_s = time.perf_counter()
    return trace_id, ended_s - began_s


def sample_of(spans: Sequence[ReceivedSpan], latency_s: float) -> TimelineSample:
    """Return the sample of one request from its spans and ``latency_s`` at the client."""
    server = next(one for one in spans if one.kind == _SERVER_KIND)
    request = next(one for one in spans if one.parent_id == server.span_id and _is_request(one))
    above = {server.span_id, request.span_id}
    parts: dict[str, float] = {}
    for one in spans:
        if one.parent_id in above and one.name in _OF_REQUEST:
            parts[one.name] = parts.get(one.name, 0.0) + one.took_s
    is_complete = "banaserve.missing" not in request.attributes
    return TimelineSample(latency_s, server.took_s, parts, is_complete)


def _is_request(span: ReceivedSpan) -> bool:
    return "gen_ai.operation.name" in span.attributes


def _figures(samples: Sequence[TimelineSample], dropped: float) -> Samples:
    figures: Samples = {
        "accounted": ([one.accounted for one in samples], "ratio"),
        "latency": ([one.latency_s for one in samples], "s"),
        "unaccounted": ([one.unaccounted_s for one in samples], "s"),
        "within_2_percent": (
            [float(abs(1 - one.accounted) <= _WITHIN) for one in samples],
            "ratio",
        ),
        "server": ([one.server_s / one.latency_s for one in samples], "ratio"),
        "complete": ([float(one.is_complete) for one in samples], "ratio"),
        "spans_lost": ([dropped], "spans"),
    }
    for name in _OF_REQUEST:
        took = [one.parts_s[name] for one in samples if name in one.parts_s]
        if took:
            figures[f"part.{name.replace(' ', '_')}"] = (took, "s")
    return figures
