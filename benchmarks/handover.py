"""Cost of handing a request from prefill to decode.

``python -m benchmarks handover``. Two servers run side by side on the same machine and get the same
prompts in turn: vLLM's own API server over one engine, and banaserve at ``--pd 1:1``. Each run uses
prompts of its own, so that no cache of an earlier run answers.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Sequence
from random import Random
from typing import NamedTuple

from banaserve.base import models
from banaserve.base.arguments import positive
from banaserve_bench.datasets.items import Words
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.loops import closed_loop
from banaserve_bench.loadgen.servers import Server, banaserve_server, vllm_server
from banaserve_bench.results.statistics import median, paired_ratios
from banaserve_bench.serving.summary import tpot_s
from benchmarks.measurement import Measurement, Samples, model_of, parser_of, progress_of

_SAME = ("--dtype", "float32", "--kv-cache-memory-bytes", str(1 << 30))
"""Options of both servers; float32, so that their answers can be compared token by token."""


class HandoverRun(NamedTuple):
    """Results of one pass of the same prompts over one server.

    Attributes:
        figures: Figures of requests sent one at a time (``alone``) and together: ``cpu`` in seconds
            of all the server's processes per request, ``steps`` of the engines per request, and
            medians of ``latency``, ``tpot`` and ``ttft`` in seconds.
        token_ids: Token ids of every answer, for comparing the two servers.
    """

    figures: dict[str, float]
    token_ids: list[list[int]]


class _Spent(NamedTuple):
    """Resources that a server has used since its start: CPU seconds and engine steps."""

    cpu_s: float
    steps: float

    @classmethod
    def of(cls, server: Server) -> _Spent:
        return cls(server.cpu_s(), server.metric("vllm:iteration_tokens_total_count"))


def main(argv: Sequence[str]) -> int:
    parser = parser_of("handover", __doc__)
    add = parser.add_argument
    add("--model", default=models.PACKAGED)
    add("--runs", type=positive, default=5)
    add("--requests", type=positive, default=12, help="a run")
    add("--concurrency", type=int, default=4)
    add("--output-tokens", type=int, default=48)
    add("--min-tokens", type=int, default=200)
    add("--max-tokens", type=int, default=1200)
    add("--seed", type=int, default=0)
    add("--gather-decode", type=float, default=0.0, metavar="S", help="as serve's")
    given = parser.parse_args(list(argv))
    measurement = Measurement("handover", given)
    runs, counts = asyncio.run(_measure(given))
    record = measurement.result(_samples(runs, counts), _NOTES, raw={"counts": counts})
    measurement.deliver(record)
    return 0


async def _measure(
    options: argparse.Namespace,
) -> tuple[list[tuple[HandoverRun, HandoverRun]], dict[str, float]]:
    """Return the runs, on vLLM's server and on ours, and how the counts of ours grew."""
    model = model_of(options.model)
    prompts = _prompts(options, model.path_or_id)
    with contextlib.ExitStack() as stack:
        advance = stack.enter_context(progress_of(1 + options.runs, "starting two servers"))
        plain = stack.enter_context(
            vllm_server(model.path_or_id, model.served_name, *_SAME, "--enforce-eager")
        )
        gather = ("--gather-decode", str(options.gather_decode))
        apart = stack.enter_context(banaserve_server(options.model, "--pd", "1:1", *gather, *_SAME))
        warm_up = prompts.pop()
        for server in (plain, apart):
            await _run(server, model.served_name, warm_up, options)
        runs: list[tuple[HandoverRun, HandoverRun]] = []
        before = _counts(apart)
        for number, batch in enumerate(prompts):
            advance(f"run {number + 1} of {options.runs}")
            pair: list[HandoverRun] = []
            for server in (plain, apart) if number % 2 else (apart, plain):
                pair.append(await _run(server, model.served_name, batch, options))
            runs.append((pair[0], pair[1]) if number % 2 else (pair[1], pair[0]))
        after = _counts(apart)
    return runs, {name: after[name] - before[name] for name in after}


def _prompts(options: argparse.Namespace, model_path: str) -> list[list[str]]:
    """Return prompts for the runs and, last, for the warm-up."""
    words = Words.of(model_path)
    draws = Random(options.seed)

    def text(key: str) -> str:
        count = draws.randint(options.min_tokens, options.max_tokens)
        return words.text(words.tokens(count, key))

    return [
        [text(f"{options.seed} {run} {n}") for n in range(options.requests)]
        for run in range(options.runs + 1)
    ]


async def _run(
    server: Server, model: str, prompts: list[str], options: argparse.Namespace
) -> HandoverRun:
    """Send half of the prompts together, for CPU time, and half one by one, for TTFT."""
    calls = CompletionCall.numbered(prompts, options.output_tokens)
    half = len(calls) // 2
    spent = [_Spent.of(server)]
    async with OpenAiClient(server.url, model, return_token_ids=True) as client:
        together = await closed_loop(client, calls[:half], options.concurrency)
        spent.append(_Spent.of(server))
        alone = await closed_loop(client, calls[half:], 1)
    spent.append(_Spent.of(server))
    records = [one.checked() for one in (*together, *alone)]
    figures = {
        "cpu": (spent[2].cpu_s - spent[0].cpu_s) / len(records),
        "cpu_alone": (spent[2].cpu_s - spent[1].cpu_s) / len(alone),
        "cpu_together": (spent[1].cpu_s - spent[0].cpu_s) / len(together),
        "steps_together": (spent[1].steps - spent[0].steps) / len(together),
        "latency_together": median([record.latency_s or 0.0 for record in together]),
        "tpot_together": median([tpot_s(record) or 0.0 for record in together]),
        "ttft": median([record.ttft_s or 0.0 for record in alone]),
    }
    return HandoverRun(figures, [record.token_ids for record in records])


def _counts(server: Server) -> dict[str, float]:
    name = "banaserve_prompt_tokens_{}_total"
    return {
        "decode_requests": server.metric("banaserve_scheduled_requests_total", instance_id="d0"),
        "decode_computed": server.metric(name.format("computed"), instance_id="d0"),
        "decode_cached": server.metric(name.format("cached"), instance_id="d0"),
        "prefill_computed": server.metric(name.format("computed"), instance_id="p0"),
        "early_tokens": server.metric("banaserve_first_tokens_total", leg="prefill"),
    }


_NOTES = (
    "cpu_ratio and ttft_ratio compare the same prompts on both servers, run by run",
    "both servers run at once; the idle one waits. One OMP thread an engine",
    "alone: one request at a time, so nothing but the hand-over differs; together: requests "
    "overlap, and an engine that does not wait for others' prompts runs more and smaller decode "
    "steps",
    "float32, greedy; equal_answers_fraction compares the tokens of both servers",
)


def _samples(runs: list[tuple[HandoverRun, HandoverRun]], counts: dict[str, float]) -> Samples:
    pairs = [(a, b) for p, q in runs for a, b in zip(p.token_ids, q.token_ids, strict=True)]
    equal = sum(a == b for a, b in pairs) / len(pairs)
    cached = counts["decode_cached"] / (counts["decode_cached"] + counts["decode_computed"])
    samples: Samples = {}
    of_both = {}
    for name in runs[0][0].figures:
        plain, apart = ([one.figures[name] for one in of] for of in zip(*runs, strict=True))
        what, _, when = name.partition("_")
        samples[f"{what}_ratio_{when}".rstrip("_")] = paired_ratios(apart, plain), "ratio"
        of_both[name] = plain, apart
    for name, shown in (("cpu", "cpu_per_request"), ("ttft", "ttft")):
        plain, apart = of_both[name]
        samples |= {shown: (apart, "s"), f"{shown}_vllm": (plain, "s")}
    return samples | {
        "decode_prompt_tokens": (
            [counts["decode_computed"] / counts["decode_requests"]],
            "tokens/request",
        ),
        "cross_instance_hit_fraction": ([cached], "fraction"),
        "equal_answers_fraction": ([equal], "fraction"),
    }
