"""Are two elastic instances ever slower than two plain vLLM servers behind a balancer?

    python -m benchmarks elastic-cpu [--quick] [--routers FOLDER] [--json FILE]

Real engines in real time on this machine's CPU, a thread each: ``banaserve serve --instances 2
--elastic`` with its defaults, against two of vLLM's own API servers behind round robin and behind
prefix affinity. All get the same requests in turn, round by round: shared prefixes, chats, and
prompts that share nothing; first with a fixed number of conversations under way, which gives
requests/s, then with arrivals at a part of that rate, which gives the time to first token. CPU
seconds are those of all processes of a system until it is idle; the other systems are suspended.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean

from banaserve.base import models
from banaserve.base.arguments import positive
from banaserve.base.errors import UserError
from banaserve.cli.terminal.console import timed
from banaserve_bench.datasets.items import Words
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.results.statistics import median
from benchmarks.elastic_cpu.figures import OURS, PEERS, LoadSample, Work, figures
from benchmarks.elastic_cpu.loads import (
    CONCURRENCY,
    LOADS,
    ChatLoad,
    arrivals_s,
    closed,
    conversations,
    opened,
)
from benchmarks.elastic_cpu.systems import SystemUnderTest, alone, empty_caches, systems
from benchmarks.measurement import Measurement, model_of, parser_of

_KV_BYTES = 1 << 30
_WARM_TRIES, _WARM_AGAIN_S = 40, 0.5


def main(argv: Sequence[str]) -> int:
    given = _parse(argv)
    asyncio.run(_measure(given, Measurement("elastic-cpu", given)))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("elastic-cpu", __doc__)
    add = parser.add_argument
    add("--quick", action="store_true", help="one round of few requests, with --eager")
    add("--rounds", type=positive, default=3)
    add("--load", action="append", choices=tuple(LOADS), help="only these; repeat")
    add("--dtype", default="float32", help="auto: vLLM's and banaserve's own choice")
    add("--rate-fraction", type=float, default=0.6, help="of requests/s, for arrivals")
    add("--eager", action="store_true", help="compile the model in neither system (both do)")
    add("--routers", type=Path, metavar="FOLDER", help="install vllm-router there and use it")
    add("--serve-option", action="append", default=[], help="of banaserve serve, as --x=y")
    add("--seed", type=int, default=0)
    given = parser.parse_args(list(argv))
    if given.quick:
        given.rounds, given.eager = 1, True
    given.load = given.load or list(LOADS)
    given.router = "vllm-router" if given.routers else "banaserve route"
    return given


def _same(given: argparse.Namespace) -> list[str]:
    same = ["--kv-cache-memory-bytes", str(_KV_BYTES)]
    if given.eager:
        same.append("--enforce-eager")
    if given.dtype != "auto":
        same += ["--dtype", given.dtype]
    return same


async def _measure(given: argparse.Namespace, measurement: Measurement) -> None:
    model = model_of(models.PACKAGED)
    words = Words.of(model.path_or_id)
    say = timed(sys.stdout)
    say("starting one banaserve, two vLLM servers and two balancers")
    samples: dict[tuple[str, str], list[LoadSample]] = defaultdict(list)
    loads = {name: LOADS[name].shortened() if given.quick else LOADS[name] for name in given.load}
    with systems(model, _same(given), given.serve_option, given.routers) as running:
        rates = {}
        for name, load in loads.items():
            rates[name] = await _warm(given, name, load, running, words, model.served_name)
            say(f"{name}: arrivals at {rates[name]:.2f} conversations/s")
        for number in range(given.rounds):
            for name, load in loads.items():
                key = f"{given.seed} {name} {number}"
                # The first system changes with each round, for effects that grow or fade over a
                # round.
                turn = number % len(running)
                for one in [*running.values()][turn:] + [*running.values()][:turn]:
                    with alone(one, running.values()):
                        sample = await _sample(
                            one, load, rates[name], key, words, model.served_name
                        )
                    samples[name, one.name].append(sample)
                    say(
                        f"round {number + 1} of {given.rounds}, {name}, {one.name}: "
                        f"{sample.requests_per_s:.2f} requests/s, TTFT {sample.ttft_s:.3f} s, "
                        f"latency {sample.latency_s:.3f} s, "
                        f"CPU {sample.cpu_s:.3f} s a request, {sample.work.steps:.2f} steps, "
                        f"{sample.work.cached_tokens:.0f} cached tokens"
                    )
            record = measurement.result(
                figures(samples), _notes(given.router), raw={"decisions": running[OURS].decisions()}
            )
            measurement.keep(record)
    measurement.deliver(record)


async def _warm(
    given: argparse.Namespace,
    name: str,
    load: ChatLoad,
    running: Mapping[str, SystemUnderTest],
    words: Words,
    model: str,
) -> float:
    """Send uncounted requests to all systems; return conversations/s for arrivals."""
    speeds = []
    for one in running.values():
        what = conversations(load, -(-load.closed // 2), f"{given.seed} {name} warm", words)
        empty_caches(one.plain)
        async with OpenAiClient(one.running.url, model) as client:
            await _reached(client, what[0].questions[0])
            began_s = time.monotonic()
            for record in await closed(client, what, CONCURRENCY):
                record.checked()
            speeds.append(len(what) / (time.monotonic() - began_s))
        await one.settled_cpu_s()
    return float(given.rate_fraction * median(speeds[-len(PEERS) :]))


async def _reached(client: OpenAiClient, prompt: str) -> None:
    """Return when a request succeeds: a balancer may still look for its servers."""
    call = CompletionCall("first", prompt=prompt, max_tokens=1)
    for _ in range(_WARM_TRIES):
        record = await client.send(call)
        if record.error is None:
            return
        await asyncio.sleep(_WARM_AGAIN_S)
    raise UserError(f"no request comes through: {record.error}")


async def _sample(
    one: SystemUnderTest, load: ChatLoad, rate_per_s: float, key: str, words: Words, model: str
) -> LoadSample:
    empty_caches(one.plain)
    busy = conversations(load, load.closed, f"{key} closed", words)
    calm = conversations(load, load.open, f"{key} open", words)
    async with OpenAiClient(one.running.url, model, return_token_ids=True) as client:
        before_s, before = await one.settled_cpu_s(), one.work()
        began_s = time.monotonic()
        kept = [one.checked() for one in await closed(client, busy, CONCURRENCY)]
        took_s = time.monotonic() - began_s
        at_s = arrivals_s(load.open, rate_per_s, key)
        arrived = [one.checked() for one in await opened(client, calm, at_s)]
        cpu_s, after = await one.settled_cpu_s() - before_s, one.work()
    records = [*kept, *arrived]
    done = (now - then for now, then in zip(after, before, strict=True))
    return LoadSample(
        requests_per_s=len(kept) / took_s,
        ttft_s=median([one.ttft_s for one in arrived if one.ttft_s is not None]),
        latency_s=fmean([one.latency_s for one in arrived if one.latency_s is not None]),
        cpu_s=cpu_s / len(records),
        tokens=[record.token_ids for record in records],
        work=Work(*(one / len(records) for one in done)),
    )


def _notes(router: str) -> list[str]:
    return [
        "real engines, a thread each; banaserve serve --instances 2 --elastic with its defaults; "
        "the processes of those that are not measured are stopped meanwhile",
        "ratios are of one round, against each of the two balancers; above 1 ours is better: "
        "requests/s over theirs, their time to first token over ours, their CPU seconds over ours",
        "cpu_ratio_min: the least of the medians of all requests_ratio and ttft_ratio; "
        "cpu_seconds_ratio_min: of all cpu_seconds_ratio",
        f"balancer of the plain servers: {router}, round_robin and cache_aware; their prefix "
        "caches are emptied before each pass, so both policies meet prompts that are new",
        f"{CONCURRENCY} conversations kept under way; arrivals are Poisson; turns of a chat follow "
        "each other at once and hold the answers that were given",
        "decisions: changes of roles and step sizes, all of ours' requests, and those in two legs",
        "equal_answers_fraction: answers with the tokens of round robin's, of the others' answers; "
        "a chat whose answer differs goes on with another prompt",
    ]
