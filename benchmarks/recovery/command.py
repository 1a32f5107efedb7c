"""Pause of a stream whose decode instance is killed, compared with recomputing its context.

``python -m benchmarks recovery``. Two servers run side by side: prefill and decode apart over the
store, and instances that do both without a store. The same stream runs on each in turn, and the
engine that decodes it is killed at the same token; the pause is the gap between two tokens at the
client. Each stream is also sent to the store's server once without a kill, for its tokens. Between
kills, the store's server gets sampled and greedy requests in turn, for their times to first token.
"""

from __future__ import annotations

import argparse
import asyncio
import random
from collections.abc import Callable, Sequence

from banaserve.base import models
from banaserve.base.arguments import positive
from banaserve.base.errors import UserError
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.loops import closed_loop
from banaserve_bench.results.result import Result
from benchmarks.measurement import (
    Measurement,
    model_of,
    parser_of,
    progress_of,
    random_tokens,
)
from benchmarks.recovery.figures import (
    ENOUGH_FOR_P99,
    KilledPair,
    KilledStream,
    RecoverySamples,
    figures_of,
)
from benchmarks.recovery.kills import Killed, KilledServer, KillPlan, killed_server

_BLOCK_TOKENS = 128
_CONTEXT_TOKENS = 8192
_TAIL_TOKENS = 24
"""Number of tokens that a stream has still to decode when its instance is killed."""
_SAME = (
    *("--dtype", "float32", "--block-size", str(_BLOCK_TOKENS)),
    *("--kv-cache-memory-bytes", str(512 << 20), "--threads-per-instance", "1"),
)
_STORE = ("--pd", "1:2", "--kv-store-size", "1536MiB")
_NO_STORE = ("--colocated", "2", "--no-kv-store")
_SAMPLING = {"greedy": 0.0, "sampled": 0.8}
_TTFT_PROMPT_TOKENS = 200
_WARM_UP_TOKENS = 300
_QUICK = {"runs": 1, "kills": 1, "contexts": [200, 2000], "pairs": 2}
_NOTES = (
    "pause.N: between the last token before the kill -9 of the engine that decodes and the first "
    "one after it, at the client, with N - 64 to N + 63 tokens of context; pause_recompute.N: the "
    "same stream, killed at the same token, on instances without a store",
    "recovery_vs_recompute.N: pause over pause_recompute, kill by kill; the one without N is that "
    "of 2,000 tokens",
    "detection: from the kill until the front door lets the stream go on, on both servers; leg: "
    "from sending it to the other instance until its first token, of which engine_wait until the "
    "scheduler saw it, fetch all copies, compute the forward pass beside them",
    "recomputed_tokens: of prompt and output, on the instance that goes on; a block has 128",
    "decoded_blocks_fetched: fetched blocks that the prompt alone does not fill",
    "first_token_sampled_ratio: median time to first token at temperature 0.8 without a seed over "
    "that of greedy requests, each with a prompt of its own of 200 tokens, in turn, run by run",
    "equal_fraction: of all killed streams, those with the tokens of the same request without one",
    "float32, one thread an engine; the killed engine starts again 0.5 s later on the same cores",
)


def main(argv: Sequence[str]) -> int:
    """Run the benchmark, writing the result after each run; return the exit code."""
    given = _parse(argv)
    measurement = Measurement("recovery", given)
    kills = given.runs * len(given.contexts) * given.kills
    with progress_of(1 + kills + given.runs, "starting two servers") as advance:
        record = asyncio.run(_measure(given, measurement, advance))
    measurement.deliver(record)
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("recovery", __doc__)
    add = parser.add_argument
    add("--model", default=models.PACKAGED)
    add("--runs", type=positive, default=5)
    add("--kills", type=positive, default=2, help="at each context in a run, on both servers")
    add("--contexts", type=positive, nargs="+", default=[200, 2000, 6000], metavar="TOKENS")
    add("--decoded-tokens", type=positive, default=136, help="of the context, by the kill; average")
    add("--pairs", type=positive, default=12, help="greedy and sampled first tokens in a run")
    add("--seed", type=int, default=0)
    add("--quick", action="store_true", help="one run, one kill, without the longest context")
    given = parser.parse_args(list(argv))
    if given.quick:
        for name, value in _QUICK.items():
            setattr(given, name, value)
    longest = _CONTEXT_TOKENS - _BLOCK_TOKENS - _TAIL_TOKENS
    if given.decoded_tokens <= _BLOCK_TOKENS // 2:
        raise UserError(f"--decoded-tokens {given.decoded_tokens}: give more than half a block")
    for context in given.contexts:
        if not given.decoded_tokens < context <= longest:
            raise UserError(
                f"--contexts {context}: more than --decoded-tokens {given.decoded_tokens} and at "
                f"most {longest}"
            )
    return given


async def _measure(
    options: argparse.Namespace, measurement: Measurement, advance: Callable[[str], None]
) -> Result:
    """Return the result of all runs, and keep that of the runs so far after each run."""
    draws, samples = random.Random(options.seed), RecoverySamples()
    name = model_of(options.model).served_name
    with (
        killed_server(options.model, name, *_STORE, *_SAME) as stored,
        killed_server(options.model, name, *_NO_STORE, *_SAME) as plain,
    ):
        for one in (stored, plain):
            await _first_tokens_s(one, _prompts(draws, 4, _WARM_UP_TOKENS), 0.0, at_once=4)
        advance("warmed up")
        for run in range(options.runs):
            for kill in range(options.kills):
                for context in options.contexts:
                    plan = _plan(draws, f"recovery-{run}-{kill}-{context}", context, options)
                    pair = await _kill_both(stored, plain, plan, stored_first=(run + kill) % 2 == 0)
                    samples.pairs.setdefault(context, []).append(pair)
                    advance(f"run {run + 1} of {options.runs}: {context} tokens of context")
            await _sample_first_tokens(stored, draws, options.pairs, samples)
            advance(f"run {run + 1} of {options.runs}: first tokens")
            record = measurement.result(
                figures_of(samples, _BLOCK_TOKENS),
                (*_NOTES, _slowest(options, run + 1)),
                raw={"pairs": {str(context): pairs for context, pairs in samples.pairs.items()}},
            )
            measurement.keep(record)
    return record


def _prompts(draws: random.Random, count: int, num_tokens: int) -> list[list[int]]:
    return [random_tokens(draws, num_tokens) for _ in range(count)]


def _plan(draws: random.Random, name: str, context: int, options: argparse.Namespace) -> KillPlan:
    """Draw a stream that is killed anywhere in a block, half a block around ``context``."""
    (prompt,) = _prompts(draws, 1, context - options.decoded_tokens)
    at_token = options.decoded_tokens - _BLOCK_TOKENS // 2 + draws.randrange(_BLOCK_TOKENS)
    return KillPlan(name, prompt, at_token, at_token + _TAIL_TOKENS)


async def _kill_both(
    stored: KilledServer, plain: KilledServer, plan: KillPlan, stored_first: bool
) -> KilledPair:
    found: dict[bool, Killed] = {}
    for has_store in (stored_first, not stored_first):
        found[has_store] = await (stored if has_store else plain).kill_under(plan)
    expected = await stored.answer(plan)
    streams = {
        has_store: KilledStream(
            len(plan.prompt), one.pause_s, one.token_ids == expected, one.traced
        )
        for has_store, one in found.items()
    }
    return KilledPair(streams[True], streams[False])


async def _sample_first_tokens(
    stored: KilledServer, draws: random.Random, pairs: int, samples: RecoverySamples
) -> None:
    found: dict[str, list[float]] = {name: [] for name in _SAMPLING}
    for pair in range(pairs):
        for name in sorted(_SAMPLING, reverse=bool(pair % 2)):
            prompts = _prompts(draws, 1, _TTFT_PROMPT_TOKENS)
            found[name] += await _first_tokens_s(stored, prompts, _SAMPLING[name])
    for name, one in found.items():
        samples.ttft_s.setdefault(name, []).append(one)


async def _first_tokens_s(
    where: KilledServer, prompts: list[list[int]], temperature: float, at_once: int = 1
) -> list[float]:
    calls = [
        CompletionCall("first", prompt=prompt, max_tokens=4, temperature=temperature)
        for prompt in prompts
    ]
    async with OpenAiClient(where.server.url, where.model) as client:
        records = await closed_loop(client, calls, at_once)
    times = (one.checked().ttft_s for one in records)
    return [one for one in times if one is not None]


def _slowest(options: argparse.Namespace, runs: int) -> str:
    """Return what is known of the longest pauses after ``runs``."""
    num_kills = runs * options.kills
    known = "p99 is of these" if num_kills >= ENOUGH_FOR_P99 else "their maximum stands for a p99"
    return f"{num_kills} kills a context on each server; {known}, {runs} runs"
