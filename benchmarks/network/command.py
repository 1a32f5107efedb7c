"""KV blocks of a prompt over a link between two hosts: transfer speed, and its hidden share.

``python -m benchmarks network``. The hosts are network namespaces of this machine, joined by links
of a set rate (``tc tbf``): it needs root. Each run fetches the blocks of another prompt by each way
in turn; ``network_fraction`` is the share of the link that the store's bytes reach, from the first
question to the last block. ``tcp`` is the same for one plain connection.

``hidden_fraction`` is that of a hand-over: the fraction by which the other host waits less for a
prompt's blocks after the prefill if they are pushed layer by layer during the prefill, instead of
requested once all are there. The prefill's layers end at even intervals, their KV is written to the
store's slots by a client, and nothing is computed. The prefill takes half of the time that the link
needs for the blocks (``below`` break-even: half of that time cannot be hidden), and one and a half
times that time (``above``).
"""

from __future__ import annotations

import argparse
from collections import defaultdict
from collections.abc import Sequence
from contextlib import ExitStack

from rich.progress import Progress

from banaserve.base.arguments import positive
from banaserve.base.errors import UserError
from benchmarks.measurement import Measurement, parser_of
from benchmarks.network import hosts
from benchmarks.network.hosts import Network
from benchmarks.network.ways import StoreWay, StreamWay

GBIT = 1e9
_RATES = (1.0, 10.0)
_PREFILLS = {"below": 0.5, "above": 1.5}
"""Durations of the prefill, as multiples of the time that the link needs for the blocks."""


def main(argv: Sequence[str]) -> int:
    given = _parse(argv)
    if why := hosts.missing():
        raise UserError(why)
    measurement = Measurement("network", given)
    samples: dict[str, list[float]] = defaultdict(list)
    with Progress(transient=True) as progress:
        for gbits in _RATES:
            _measure(gbits, given, samples, progress)
    figures = {name: (taken, _unit(name)) for name, taken in samples.items()}
    measurement.deliver(measurement.result(figures, _notes(given)))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("network", __doc__)
    add = parser.add_argument
    add("--runs", type=positive, default=7)
    add("--blocks", type=positive, default=125, help="of a prompt; 16 tokens each")
    add("--block-bytes", type=int, default=2 << 20, help="of all layers; Llama-3.1-8B's")
    given = parser.parse_args(list(argv))
    if given.block_bytes < 1 << 17:
        raise UserError("a block has 128 KiB or more")
    return given


def _measure(
    gbits: float, given: argparse.Namespace, samples: dict[str, list[float]], progress: Progress
) -> None:
    task = progress.add_task(f"{gbits:g} Gbit/s", total=given.runs + 1)
    num_bytes = given.blocks * given.block_bytes
    with ExitStack() as stack:
        network = Network(2)
        stack.callback(network.close)
        for host in network.hosts:
            network.limit(host, gbits * GBIT)
        store = StoreWay(network.hosts, stack, given.block_bytes, given.blocks)
        ways: dict[str, StoreWay | StreamWay] = {
            "network": store,
            "tcp": StreamWay(network.hosts, num_bytes),
        }
        for way in ways.values():
            way.fetch_s(0)  # warm-up: first use of pages, opening of links
        progress.advance(task)
        for run in range(1, given.runs + 1):
            for name, way in ways.items():
                share = num_bytes * 8 / way.fetch_s(run) / (gbits * GBIT)
                samples[f"{name}_fraction_{gbits:g}gbit"].append(share)
            _hand_over(store, run, num_bytes * 8 / (gbits * GBIT), f"{gbits:g}gbit", samples)
            progress.advance(task)


def _hand_over(
    store: StoreWay, run: int, link_s: float, rate: str, samples: dict[str, list[float]]
) -> None:
    for name, times in _PREFILLS.items():
        asked_s, pushed_s = (
            store.exposed_s(f"{name}-{run}-{is_pushed}", times * link_s, is_pushed=is_pushed)
            for is_pushed in (False, True)
        )
        samples[f"asked_exposed_s_{rate}_{name}"].append(asked_s)
        samples[f"pushed_exposed_s_{rate}_{name}"].append(pushed_s)
        samples[f"hidden_fraction_{rate}_{name}"].append(1.0 - pushed_s / asked_s)


def _unit(name: str) -> str:
    return "s" if "_s_" in name else "fraction"


def _notes(given: argparse.Namespace) -> list[str]:
    return [
        f"{given.blocks} blocks of {given.block_bytes >> 10} KiB, {16 * given.blocks} tokens; a "
        "fraction is of the link's rate, Ethernet's and TCP's heads counted against all alike",
        "links are shaped in bandwidth alone: their latency is that of this machine",
        "both hosts, with all of their processes, share this machine's cores",
    ]
