"""Cost of the front door, compared with vLLM's own API server.

``python -m benchmarks front``. Four servers run side by side over a miniature model whose steps
cost almost nothing: vLLM's API server with one engine, and banaserve with four engines, colocated
and apart, and with one engine, which separates the cost of its code from that of three more engines
on the same processors. Each gets the same requests in turn. The measured quantity is the CPU time
of the process that answers HTTP, as the system accounts it, so other programs on the machine affect
latencies more than this time.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from banaserve.base.arguments import positive
from banaserve.base.models import miniature
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.loops import closed_loop
from banaserve_bench.loadgen.servers import Server, banaserve_server, vllm_server
from banaserve_bench.results.result import Result
from banaserve_bench.results.statistics import paired_ratios, percentile
from benchmarks.measurement import Measurement, Samples, parser_of, progress_of, random_tokens

_NAME = "miniature"
_CONTEXT_TOKENS = 1024
_SHORT, _LONG = 4, 32
"""Output tokens of the two kinds of request, which separate the costs of requests and chunks."""
_MIN_REQUESTS = 24
_SAME = ("--dtype", "float32", "--max-model-len", str(_CONTEXT_TOKENS))
_OURS = (*_SAME, "--kv-store-size", "256MiB", "--max-concurrent-requests", "1024")
_SYSTEMS = {
    "colocated": ("--colocated", "4"),
    "pd": ("--pd", "2:2"),
    "one": ("--colocated", "1"),
}
_VLLM = "vllm"


class FrontSample(NamedTuple):
    """Results of one pass of requests over one server.

    Attributes:
        cpu_s: CPU seconds of the process that answers HTTP, user and system.
        chunks: Number of events with text that the client got.
    """

    requests: int
    chunks: int
    tokens: int
    cpu_s: float
    ttft_s: list[float]
    gaps_s: list[float]


def main(argv: Sequence[str]) -> int:
    parser = parser_of("front", __doc__)
    parser.add_argument("--runs", type=positive, default=5)
    parser.add_argument(
        "--streams",
        type=lambda text: tuple(map(int, text.split(","))),
        default=(1, 64, 512),
        help="under way at once, such as 1,64,512",
    )
    parser.add_argument("--system", choices=(*_SYSTEMS, "all"), default="all")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    given = parser.parse_args(list(argv))
    measurement = Measurement("front", given)
    measurement.deliver(asyncio.run(_measure(given, measurement)))
    return 0


FrontSamples = dict[tuple[str, int, int], list[FrontSample]]
"""Samples by system, streams and output tokens, one for each run."""


async def _measure(given: argparse.Namespace, measurement: Measurement) -> Result:
    tiny = miniature.Miniature(1, 2, 2, _CONTEXT_TOKENS)
    model = miniature.resolve(tiny, _NAME, None, print)
    systems = [given.system] if given.system != "all" else list(_SYSTEMS)
    samples: FrontSamples = {}
    record: Result
    with contextlib.ExitStack() as stack:
        advance = stack.enter_context(progress_of(1 + given.runs, "starting servers"))
        plain = vllm_server(model.path_or_id, _NAME, *_SAME, *_KV, "--enforce-eager")
        servers = {_VLLM: stack.enter_context(plain)}
        for name in systems:
            started = banaserve_server(model.path_or_id, *_SYSTEMS[name], *_OURS, *_KV)
            servers[name] = stack.enter_context(started)
        for server in servers.values():
            await _pass(server, given.prompt_tokens, min(64, max(given.streams)), _SHORT, 0)
        for run in range(1, given.runs + 1):
            advance(f"run {run} of {given.runs}")
            names = list(servers) if run % 2 else list(reversed(servers))
            for streams in given.streams:
                for tokens in (_SHORT, _LONG):
                    for name in names:
                        sample = await _pass(
                            servers[name], given.prompt_tokens, streams, tokens, run
                        )
                        samples.setdefault((name, streams, tokens), []).append(sample)
            memory = {name: servers[name].front_memory_bytes() for name in servers}
            record = measurement.result(_figures(given, run, samples, memory), _notes(given))
            measurement.keep(record)
    return record


_KV = ("--kv-cache-memory-bytes", str(256 << 20), "--served-model-name", _NAME)


async def _pass(
    server: Server, prompt_tokens: int, streams: int, output_tokens: int, run: int
) -> FrontSample:
    """Send requests with ``streams`` under way at once, at least ``_MIN_REQUESTS`` in all."""
    draws = random.Random(f"{run} {streams} {output_tokens}")
    prompts = [random_tokens(draws, prompt_tokens) for _ in range(max(streams, _MIN_REQUESTS))]
    calls = CompletionCall.numbered(prompts, output_tokens)
    async with OpenAiClient(server.url, _NAME) as client:
        before_s = server.front_cpu_s()
        records = await closed_loop(client, calls, streams)
        cpu_s = server.front_cpu_s() - before_s
    for one in records:
        one.checked()
    return FrontSample(
        len(calls),
        sum(len(record.token_at_s) for record in records),
        sum(record.completion_tokens or 0 for record in records),
        cpu_s,
        [record.ttft_s for record in records if record.ttft_s is not None],
        [gap for record in records for gap in record.gaps_s],
    )


def costs_us(samples: Sequence[FrontSample]) -> tuple[float, float]:
    """Return microseconds per request and per chunk: least squares over two kinds of passes.

    Raises:
        ValueError: All passes have the same number of chunks per request.
    """
    work = np.array([(one.requests, one.chunks) for one in samples], dtype=np.float64)
    if np.linalg.matrix_rank(work) < 2:
        raise ValueError("passes of one kind tell nothing about requests and chunks apart")
    spent_us = np.array([one.cpu_s for one in samples]) * 1e6
    (request_us, chunk_us), *_ = np.linalg.lstsq(work, spent_us, rcond=None)
    return float(request_us), float(chunk_us)


def _figures(
    given: argparse.Namespace, runs: int, samples: FrontSamples, memory: Mapping[str, int]
) -> Samples:
    figures: Samples = {}
    for name in memory:
        for streams in given.streams:
            figures |= _of_load(samples, name, streams, runs)
        figures[f"{name}_memory"] = [float(memory[name])], "bytes"
    for name in memory:
        if name == _VLLM:
            continue
        everywhere = [
            ratio for streams in given.streams for ratio in _ratios(samples, name, streams, runs)
        ]
        suffix = "" if name == "colocated" else f"_{name}"
        figures[f"front_cpu_ratio{suffix}"] = everywhere, "ratio"
        for streams in given.streams:
            ratios = _ratios(samples, name, streams, runs)
            figures[f"front_cpu_ratio{suffix}_{streams}"] = ratios, "ratio"
            figures |= _added(samples, name, streams, runs)
    return figures


def _notes(given: argparse.Namespace) -> list[str]:
    return [
        "front_cpu_ratio: CPU of banaserve's front door over four colocated instances over "
        "that of vLLM's API server over one engine, pass by pass, same requests; _pd: 2:2; "
        "_one: one colocated instance",
        "CPU of the one process that answers HTTP; engines and store are not in it",
        f"requests of {given.prompt_tokens} prompt tokens, {_SHORT} and {_LONG} output tokens",
        "request_cpu and chunk_cpu: least squares over both kinds of pass in a run",
        "added: percentile at banaserve less that at vLLM, of the requests of one run; "
        "negative where four engines are faster than one",
        "miniature of one layer, float32, one OMP thread an engine; memory: PSS of the process",
    ]


def _of_load(samples: FrontSamples, name: str, streams: int, runs: int) -> Samples:
    pairs = [
        [samples[name, streams, tokens][run] for tokens in (_SHORT, _LONG)] for run in range(runs)
    ]
    costs = [costs_us(pair) for pair in pairs]
    stem = f"{name}_{streams}"
    chunks = [sum(one.chunks for one in pair) / sum(one.tokens for one in pair) for pair in pairs]
    return {
        f"{stem}_request_cpu": ([cost[0] for cost in costs], "us"),
        f"{stem}_chunk_cpu": ([cost[1] for cost in costs], "us"),
        f"{stem}_chunks_a_token": (chunks, "ratio"),
    }


def _ratios(samples: FrontSamples, name: str, streams: int, runs: int) -> list[float]:
    """Return front CPU over vLLM's for the same requests, both kinds of pass of a run together."""

    def spent_s(system: str, run: int) -> float:
        return sum(samples[system, streams, tokens][run].cpu_s for tokens in (_SHORT, _LONG))

    ours = [spent_s(name, run) for run in range(runs)]
    return paired_ratios(ours, [spent_s(_VLLM, run) for run in range(runs)])


def _added(samples: FrontSamples, name: str, streams: int, runs: int) -> Samples:
    found: Samples = {}
    for percent in (50, 99):
        for what in ("ttft", "gap"):
            added = [
                _latency(samples[name, streams, _LONG][run], what, percent)
                - _latency(samples[_VLLM, streams, _LONG][run], what, percent)
                for run in range(runs)
            ]
            found[f"{name}_{streams}_added_{what}_p{percent}"] = (added, "s")
    return found


def _latency(sample: FrontSample, what: str, percent: int) -> float:
    return percentile(sample.ttft_s if what == "ttft" else sample.gaps_s or [0.0], percent)
