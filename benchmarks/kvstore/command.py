"""Cost of the KV cache store, compared with plain copies.

``python -m benchmarks kvstore``. Measures put and get through the pool against plain memcpy of as
many bytes, and the SSD tier against raw direct I/O. Compared measurements take turns within each
run, and no cache of the processor holds the copied bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import tempfile
from collections import defaultdict
from collections.abc import Callable, Sequence
from pathlib import Path

from banaserve.base.arguments import positive
from banaserve_bench.results.statistics import median
from benchmarks.kvstore.disk import DiskBench, DiskTimes, check_direct
from benchmarks.kvstore.memory import (
    ARRANGEMENTS,
    BLOCK_BYTES,
    MIB,
    PoolBench,
    PoolTimes,
    store_daemon,
)
from benchmarks.measurement import Measurement, parser_of, progress_of, with_units

_POOL_SIZE = "512MiB"
_NUM_LOOKUPS = 300

# Figures that come first; the cases that they sum up follow.
_FIRST = (
    "put_memcpy_fraction",
    "get_memcpy_fraction",
    "put_memcpy_cpu_fraction",
    "get_memcpy_cpu_fraction",
    "ssd_write_fraction",
    "ssd_read_fraction",
    "lookups_of_64_keys_per_s",
    "round_trips_per_request",
)
StoreSamples = dict[str, list[float]]
Advance = Callable[[str], None]
_UNITS = {"fraction": "fraction", "gb_per_s": "GB/s", "per_s": "calls/s", "request": "calls"}


def main(argv: Sequence[str]) -> int:
    given = _parse(argv)
    measurement = Measurement("kvstore", given)
    samples: StoreSamples = defaultdict(list)
    with progress_of(2 * given.runs, "pool") as advance:
        notes = _memory(given, samples, advance)
        notes += _disk(given, samples, advance)
    ordered = {name: samples[name] for name in (*_FIRST, *samples)}
    measurement.deliver(measurement.result(with_units(ordered, _UNITS), notes))
    return 0


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of("kvstore", __doc__)
    add = parser.add_argument
    add("--runs", type=positive, default=5)
    add("--repeats", type=positive, default=9, help="of each copy within a run; the median counts")
    add("--blocks", type=positive, default=16, help="of a request")
    add("--disk-blocks", type=positive, default=64, help="of a run on disk")
    add("--depth", type=positive, default=8, help="transfers of the disk at once")
    add("--folder", type=Path, default=Path("/var/tmp"), help="on the disk to measure")
    add("--seed", type=int, default=0)
    return parser.parse_args(list(argv))


def _memory(given: argparse.Namespace, samples: StoreSamples, advance: Advance) -> list[str]:
    with contextlib.ExitStack() as stack:
        benches: list[tuple[str, PoolBench]] = []
        for block_bytes in BLOCK_BYTES:
            daemon = stack.enter_context(store_daemon(_POOL_SIZE))
            for num_blocks in (given.blocks, 1):
                bench = PoolBench(daemon, block_bytes, num_blocks, given.seed)
                stack.callback(bench.close)
                size = f"{block_bytes / MIB:g}mib"
                benches.append((size if num_blocks > 1 else f"{size}_single", bench))
        # The first round meets page faults, and a pool that is not full yet.
        for _, bench in benches:
            for _ in range(4 * given.blocks // bench.num_blocks):
                bench.run("layers")
        for _ in range(given.runs):
            _memory_run(benches, given, samples)
            advance("pool")
    return [
        f"put: reserve, copy, commit; get: lease, copy, release; {given.blocks} blocks a request, "
        "one block where it says single",
        "put_ and get_memcpy_fraction: over 1.5 and 3 MiB blocks, copied layer by layer (32 "
        "layers, as an engine does) and whole; plain memcpy moves as many bytes within a process",
        "cpu_fraction: seconds on a processor, of client and daemon, instead of the clock's: on a "
        "machine that others use too, a reply waits for its turn",
        "round_trips_per_request: waits for the daemon of a request, half of which is cached",
    ]


def _memory_run(
    benches: Sequence[tuple[str, PoolBench]], given: argparse.Namespace, samples: StoreSamples
) -> None:
    total = PoolTimes(*[0.0] * len(PoolTimes._fields))
    for name, bench in benches:
        taken: dict[str, list[PoolTimes]] = {arrangement: [] for arrangement in ARRANGEMENTS}
        for _ in range(given.repeats):
            for arrangement in ARRANGEMENTS:
                taken[arrangement].append(bench.run(arrangement))
        for arrangement, times in taken.items():
            typical = PoolTimes(*(median(column) for column in zip(*times, strict=True)))
            case = f"memcpy_fraction_{name}_{arrangement}"
            samples[f"put_{case}"].append(typical.memcpy_s / typical.put_s)
            samples[f"get_{case}"].append(typical.memcpy_s / typical.get_s)
            if bench.num_blocks > 1:
                total = PoolTimes(*(a + b for a, b in zip(total, typical, strict=True)))
    num_bytes = 2 * given.blocks * sum(BLOCK_BYTES)
    samples["put_memcpy_fraction"].append(total.memcpy_s / total.put_s)
    samples["get_memcpy_fraction"].append(total.memcpy_s / total.get_s)
    samples["put_memcpy_cpu_fraction"].append(total.memcpy_cpu_s / total.put_cpu_s)
    samples["get_memcpy_cpu_fraction"].append(total.memcpy_cpu_s / total.get_cpu_s)
    for name, seconds in zip(("memcpy", "put", "get"), total[:3], strict=True):
        samples[f"{name}_gb_per_s"].append(num_bytes / seconds / 1e9)
    samples["lookups_of_64_keys_per_s"].append(benches[0][1].lookups_per_s(_NUM_LOOKUPS))
    samples["round_trips_per_request"].append(benches[0][1].round_trips())


def _disk(given: argparse.Namespace, samples: StoreSamples, advance: Advance) -> list[str]:
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=given.folder)))
        check_direct(folder)
        benches: list[tuple[str, DiskBench]] = []
        for block_bytes in BLOCK_BYTES:
            size = f"{block_bytes / MIB:g}mib"
            (folder / size).mkdir()
            bench = DiskBench(
                folder / size, block_bytes, given.disk_blocks, given.depth, given.seed
            )
            stack.callback(bench.close)
            benches.append((size, bench))
            for _ in range(2):
                bench.run(tier_first=False)
        for number in range(given.runs):
            total = DiskTimes(0.0, 0.0, 0.0, 0.0)
            for size, bench in benches:
                times = bench.run(tier_first=bool(number % 2))
                samples[f"ssd_write_fraction_{size}"].append(times.raw_write_s / times.tier_write_s)
                samples[f"ssd_read_fraction_{size}"].append(times.raw_read_s / times.tier_read_s)
                total = DiskTimes(*(a + b for a, b in zip(total, times, strict=True)))
            num_bytes = given.disk_blocks * sum(BLOCK_BYTES)
            samples["ssd_write_fraction"].append(total.raw_write_s / total.tier_write_s)
            samples["ssd_read_fraction"].append(total.raw_read_s / total.tier_read_s)
            for name, seconds in zip(DiskTimes._fields, total, strict=True):
                rate = num_bytes / seconds / 1e9
                samples[f"disk_{name.removesuffix('_s')}_gb_per_s"].append(rate)
            advance("disk")
        direct = "past" if benches[0][1].is_direct else "through"
        return [
            f"disk: {given.depth} transfers at once; raw: pwritev and preadv with O_DIRECT from "
            f"threads on one preallocated file; the tier: a file per block, {direct} the page "
            "cache, its budget used up, checksums included"
        ]
