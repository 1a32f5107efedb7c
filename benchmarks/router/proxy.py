"""Cost of a router for a request and a streamed part, against vllm-router and sglang-router.

CPU seconds of the router's own processes, user and system, over closed loops of the same requests
to the same replicas; health checks, retries and metrics are on in all of them. A part's cost is
what a stream costs beyond a whole answer, divided by its parts.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import sys
from collections import defaultdict

from banaserve_bench.loadgen.servers import Server, command_server, route_command, wait_until
from banaserve_bench.results.statistics import paired_ratios, percentile
from benchmarks.measurement import Samples, with_units
from benchmarks.router import load
from benchmarks.router.peers import PEERS, peer_command
from benchmarks.router.replica import NUM_PARTS

NUM_REPLICAS = 4
_PEER, _BY_CACHE = "vllm-router", "cache_aware"
NUM_CALLERS = 16
_FOUND_TIMEOUT_S = 20.0


def figures(options: argparse.Namespace) -> tuple[Samples, list[str]]:
    """Run all measurements; return figures and notes.

    Args:
        options: Options of the command.

    Raises:
        UserError: A router could not be installed or started.
    """
    samples: dict[str, list[float]] = defaultdict(list)
    with contextlib.ExitStack() as stack:
        replica = [sys.executable, "-m", "benchmarks.router.replica"]
        urls = [
            stack.enter_context(command_server(replica, f"replica{n}")).url
            for n in range(NUM_REPLICAS)
        ]
        servers = {
            name: stack.enter_context(command_server(command, name))
            for name, command in _commands(options, urls).items()
        }
        for server in servers.values():
            _warm(server.url, options)
        # In turns, so that other work of the machine affects all of them.
        for run in range(options.runs):
            direct_ms = _latency(urls[0], options, run)
            samples["direct_p99_ms"].append(direct_ms)
            for name, server in servers.items():
                _sample(name, server, options, run, direct_ms, samples)
    found = with_units(samples, {"_us": "us", "_ms": "ms"})
    ours = f"banaserve_{options.policy}"
    for kind, named in (("request", "request"), ("part", "chunk")):
        for name in (_PEER, f"{_PEER}_{_BY_CACHE}"):
            if (theirs := samples.get(f"{name}_cpu_{kind}_us")) is not None:
                ratios = paired_ratios(samples[f"{ours}_cpu_{kind}_us"], theirs)
                found[f"cpu_per_{named}_ratio{name.removeprefix(_PEER)}"] = ratios, "ratio"
    return found, [
        f"{NUM_REPLICAS} replicas that cost next to nothing, {NUM_CALLERS} connections; "
        f"{NUM_PARTS} parts a stream",
        f"ratios: banaserve with {options.policy} to {_PEER} with round robin, and to {_PEER} with "
        f"{_BY_CACHE}, its default, which reads each prompt too",
        f"p99 is at {options.rate:g} requests/s, less that of a replica asked directly",
    ]


def _commands(options: argparse.Namespace, urls: list[str]) -> dict[str, list[str]]:
    made = {
        f"banaserve_{policy}": route_command(policy, urls)
        for policy in dict.fromkeys((options.policy, "round_robin"))
    }
    if options.processes > 1:
        several = [*made[f"banaserve_{options.policy}"], "--processes", str(options.processes)]
        made[f"banaserve_{options.policy}_{options.processes}_processes"] = several
    if options.peers is None:
        return made
    for name in PEERS:
        made[name] = peer_command(options.peers, name, "round_robin", urls)
    made[f"{_PEER}_{_BY_CACHE}"] = peer_command(options.peers, _PEER, _BY_CACHE, urls)
    return made


def _warm(url: str, options: argparse.Namespace) -> None:
    wait_until(lambda: _serves(url), _FOUND_TIMEOUT_S, "a router found no replica")
    asyncio.run(load.closed_loop(url, _bodies(options, 500, -1, False), NUM_CALLERS))


def _serves(url: str) -> bool:
    """Return whether requests succeed: routers are healthy before they know their replicas."""
    with contextlib.suppress(Exception):
        asyncio.run(load.closed_loop(url, load.bodies(20, 0, False), 4))
        return True
    return False


def _sample(
    name: str,
    server: Server,
    options: argparse.Namespace,
    run: int,
    direct_ms: float,
    samples: dict[str, list[float]],
) -> None:
    """Add one run of one router to ``samples``."""
    whole = _bodies(options, options.requests, run, False)
    streams = _bodies(options, options.streams, run, True)
    request_us = _cpu_us(server, whole, NUM_CALLERS)
    stream_us = _cpu_us(server, streams, NUM_CALLERS * 4)
    samples[f"{name}_cpu_request_us"].append(request_us)
    samples[f"{name}_cpu_part_us"].append((stream_us - request_us) / NUM_PARTS)
    samples[f"{name}_added_p99_ms"].append(_latency(server.url, options, run) - direct_ms)


def _bodies(options: argparse.Namespace, count: int, run: int, is_stream: bool) -> list[bytes]:
    return load.bodies(count, options.seed + run, is_stream)


def _cpu_us(server: Server, asked: list[bytes], num_callers: int) -> float:
    before_s = server.precise_cpu_s()
    asyncio.run(load.closed_loop(server.url, asked, num_callers))
    return (server.precise_cpu_s() - before_s) / len(asked) * 1e6


def _latency(url: str, options: argparse.Namespace, run: int) -> float:
    """Return the 99th percentile of the latency in milliseconds."""
    asked = _bodies(options, options.requests // 4, run, False)
    return percentile(asyncio.run(load.open_loop(url, asked, options.rate)), 99) * 1e3
