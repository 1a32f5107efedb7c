"""Agent sessions with the store and the elastic policy, beside plain engines behind balancers.

    python -m benchmarks agents --data FOLDER [--seeds 2] [--json FILE]

FOLDER holds the data of ``benchmarks/routers/loads.py``. Four paced engines serve coding sessions
with tool calls, resets, system prompts in common and subagents: plain vLLM engines behind
``banaserve route``, with round robin and with session affinity, ``serve --colocated 4`` with its
store and default routing, and ``serve --instances 4``, which is elastic. One token of the engines
stands for 16 of the modelled model: in its time, in KV bytes and in lengths.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple

from banaserve.base.arguments import positive
from banaserve.base.config.serve_config import MINIATURE
from banaserve.base.errors import UserError
from banaserve.orchestrator.control.costs import profile as profiles
from banaserve.orchestrator.control.costs.profile import Profile
from banaserve.sim.result import LatencyLimits
from banaserve_bench.loadgen.client import CompletionCall, OpenAiClient
from banaserve_bench.loadgen.loops import closed_loop
from banaserve_bench.loadgen.modelled_time import StretchedClock, modelled_time
from banaserve_bench.loadgen.servers import Server, balanced, banaserve_server
from banaserve_bench.plan.probe.profile_file import profile_text
from banaserve_bench.results.result import ModelledTime, Result
from banaserve_bench.results.statistics import paired_ratios
from benchmarks.agents.figures import COLUMNS, UNITS, ended_turns, equal_fraction, figures_of
from benchmarks.agents.sessions import TOKENS, coarse, sessions
from benchmarks.agents.turns import AgentTurn, run_seats
from benchmarks.elastic_cpu.systems import EMPTIES_CACHES, empty_caches
from benchmarks.measurement import Measurement, Samples, parser_of, random_tokens

PLAIN = {"round-robin": "round_robin", "session-affinity": "session_affinity"}
OURS = ("banaserve", "banaserve-elastic")
_PLAIN_OPTIONS = (
    *("--colocated", "1", "--no-kv-store", "--migration", "off", "--orchestrator", "off"),
)
_STORE = ("--kv-store-size", "256MiB")
"""Room for 4.2 million tokens of the model, 550 GB of its KV: memory of a host with four GPUs."""
_WARM_TOKENS = 256
"""Length of the first prompts, from which the store's gate learns what a step takes."""
_WAITED = "banaserve_waited_for_prefix_total"
_NOTES = (
    "paced: real engines and store, the time of their steps is modelled; times in modelled s, "
    f"lengths in tokens of the model, {TOKENS} of which are one token of the engines",
    "goodput: turns within --ttft to the first token and --tpot, a token of the model; "
    "ratios are of one seed, over the better of the two plain systems",
    "repeated: prompt tokens that were computed though another request had computed them or was "
    "computing them before, in whole blocks; hit_over_bound: cached tokens over those known so",
    "waited: requests that waited for a prefix that another one was computing",
    "equal_fraction: answers with the tokens that round robin gave to the same prompts",
)


class SystemRuns(NamedTuple):
    """Runs of a system, in the order of the seeds.

    Attributes:
        waited: Number of requests that waited for a prefix, of each run.
        times: Modelled time of each of its servers.
    """

    turns: list[list[AgentTurn]]
    waited: list[float]
    times: list[ModelledTime]


def main(argv: Sequence[str]) -> int:
    given = _parse(argv)
    measurement = Measurement("agents", given)
    profile = coarse(profiles.load(given.profile))
    found: dict[str, SystemRuns] = {}
    with TemporaryDirectory(prefix="bench-") as folder:
        path = Path(folder) / f"{profile.name}.toml"
        path.write_text(profile_text(profile, [f"{given.profile}, a token for {TOKENS}"]))
        same = (
            *("--pace", str(path), "--dilate", f"{given.dilate:g}"),
            *("--max-num-batched-tokens", str(given.max_num_batched_tokens)),
            "--enable-prompt-tokens-details",
        )
        with _plain_servers(given, same) as servers:
            for name, policy in PLAIN.items():
                empty_caches(servers)
                with balanced(policy, servers) as door:
                    found[name] = _runs(given, name, door.url, profile, servers)
        for name, options in _own_options(given).items():
            with banaserve_server(MINIATURE, *options, *same) as server:
                found[name] = _runs(given, name, server.url, profile, [server])
    measurement.deliver(_result(given, measurement, found))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("agents", __doc__)
    add = parser.add_argument
    add("--data", type=Path, required=True, metavar="FOLDER")
    add("--seeds", type=positive, default=2)
    add("--agents", type=positive, default=24, help="sessions under way at once")
    add("--instances", type=positive, default=4)
    add("--duration", type=float, default=240.0, help="of a run, modelled s")
    add("--warm-up", type=float, default=80.0, help="of these, in which turns do not count")
    add("--dilate", type=float, default=0.3, help="wall seconds of a modelled one")
    add("--max-num-batched-tokens", type=positive, default=512, help="of a step, of all systems")
    add("--ttft", type=float, default=2.0, help="limit, modelled s")
    add("--tpot", type=float, default=0.05, help="limit, modelled s a token of the model")
    add("--profile", default="llama-3.1-70b-h100-tp4")
    given = parser.parse_args(list(argv))
    if given.duration <= given.warm_up:
        raise UserError(f"--duration {given.duration:g}: give more than --warm-up")
    return given


def _own_options(given: argparse.Namespace) -> dict[str, tuple[str, ...]]:
    """Return the options of banaserve's systems, as a user would start them."""
    limits = ("--slo-ttft", f"{given.ttft:g}", "--slo-tpot", f"{TOKENS * given.tpot:g}")
    size = str(given.instances)
    both = (("--colocated", size), ("--instances", size, *limits))
    return {name: (*one, *_STORE) for name, one in zip(OURS, both, strict=True)}


@contextlib.contextmanager
def _plain_servers(given: argparse.Namespace, same: Sequence[str]) -> Iterator[list[Server]]:
    with contextlib.ExitStack() as stack:
        yield [
            stack.enter_context(
                banaserve_server(MINIATURE, *_PLAIN_OPTIONS, *same, environment=EMPTIES_CACHES)
            )
            for _ in range(given.instances)
        ]


def _runs(
    given: argparse.Namespace, name: str, url: str, profile: Profile, servers: Sequence[Server]
) -> SystemRuns:
    runs = SystemRuns([], [], [])
    before = _waited(servers)
    for seed in range(given.seeds):
        turns = asyncio.run(_run(given, url, profile, seed))
        runs.turns.append(turns)
        now = _waited(servers)
        runs.waited.append(now - before)
        before = now
        told = _figures(given, turns)
        print(
            f"{name}, seed {seed}: {told['turns_per_s']:.2f} turns/s, {told['goodput']:.2f} good, "
            f"TTFT {told['ttft_mean']:.2f} s, TPOT {1e3 * told['tpot_mean']:.1f} ms, "
            f"{told['computed_fraction']:.1%} of the prompts computed, "
            f"{told['repeated_fraction']:.1%} of that again",
            flush=True,
        )
    for server in servers:
        told_time = modelled_time(server.url)
        assert told_time is not None, "a paced server says how it kept time"
        runs.times.append(told_time)
    late = max(one.overrun_fraction for one in runs.times)
    print(f"{name}: {late:.1%} of the steps late, {sum(runs.waited):.0f} waits", flush=True)
    return runs


async def _run(given: argparse.Namespace, url: str, profile: Profile, seed: int) -> list[AgentTurn]:
    clock = StretchedClock(given.dilate)
    async with OpenAiClient(
        url, f"paced-{profile.name}", return_token_ids=True, read_late=True, clock=clock
    ) as client:
        draws = Random(f"warm {seed}")
        prompts = (random_tokens(draws, _WARM_TOKENS) for _ in range(2 * given.instances))
        calls = CompletionCall.numbered(prompts, 2)
        for record in await closed_loop(client, calls, len(calls)):
            record.checked()
        made = sessions(given.data, seed, profile.model.max_context_tokens)
        return await run_seats(client, made, seed, given.agents, given.duration)


def _waited(servers: Sequence[Server]) -> float:
    return sum(server.metric(_WAITED) for server in servers)


def _figures(given: argparse.Namespace, turns: Sequence[AgentTurn]) -> dict[str, float]:
    limits = LatencyLimits(given.ttft, given.tpot)
    return figures_of(turns, given.warm_up, given.duration, limits)


def _result(
    given: argparse.Namespace, measurement: Measurement, found: Mapping[str, SystemRuns]
) -> Result:
    told = {name: [_figures(given, turns) for turns in runs.turns] for name, runs in found.items()}
    goodput = {name: [one["goodput"] for one in each] for name, each in told.items()}
    better = [max(pair) for pair in zip(*(goodput[name] for name in PLAIN), strict=True)]
    samples: Samples = {}
    for name in OURS:
        samples[f"{name}.goodput_ratio"] = paired_ratios(goodput[name], better), "ratio"
    for name, each in told.items():
        for metric, unit in UNITS.items():
            samples[f"{name}.{metric}"] = [one[metric] for one in each], unit
        late = [one.overrun_fraction for one in found[name].times]
        samples[f"{name}.late_fraction"] = late, "fraction"
        samples[f"{name}.waited"] = found[name].waited, "requests"
        pairs = zip(found[name].turns, found["round-robin"].turns, strict=True)
        samples[f"{name}.equal_fraction"] = [equal_fraction(*pair) for pair in pairs], "fraction"
    times = [one for runs in found.values() for one in runs.times]
    rows = {name: [*map(ended_turns, runs.turns)] for name, runs in found.items()}
    raw = {"columns": list(COLUMNS), "turns": rows}
    return measurement.result(samples, _NOTES, raw=raw, modelled_time=times)
